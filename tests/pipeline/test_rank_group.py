"""Ranks of one group: equal weights or none, one state at the start, and who is to blame when one is missing."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest
import torch

import rank_group
from paceline.config import FlowConfig
from paceline.errors import StageError
from paceline.pipeline.coordinator import Coordinator, Work
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.messages import Failed, Ready
from paceline.pipeline.multinode import ALONE, rank_groups
from paceline.pipeline.prefetch import Prefetcher
from paceline.pipeline.process import WorkerProcess
from paceline.pipeline.telemetry import RemoteObserver
from paceline.types import PlannedStep


@pytest.fixture
def ranks() -> Generator[list[WorkerProcess], None, None]:
    """Two ranks that have found one another."""
    with rank_groups(ALONE, 2) as groups:
        workers = [WorkerProcess(f"drafter {n}", rank_group.RankStage, (group,)) for n, group in enumerate(groups)]
        yield workers
        for worker in workers:
            worker.stop(0.0)


def answers(ranks: list[WorkerProcess], message: Any) -> list[Any]:
    for worker in ranks:
        if not worker.ready:
            assert isinstance(worker.connection.recv().payload, Ready)
            worker.ready = True
    for worker in ranks:
        worker.connection.send(message)
    return [worker.connection.recv().payload for worker in ranks]


def test_ranks_take_on_the_first_ones_state_and_ask_together(ranks: list[WorkerProcess]) -> None:
    assert answers(ranks, ("equal", 0.0)) == ["equal", "equal"]
    first, second = answers(ranks, ("spread",))
    for state in (first, second):
        assert torch.equal(state["a"][0], torch.arange(6.0).view(2, 3))
        assert state["a"][1] == {"n": 0}
        assert int(state["b"][0]) == 0 and state["b"][1] == "text"
    assert answers(ranks, ("asks", 1)) == [True, True]
    assert answers(ranks, ("asks",)) == [False, False]


def test_a_rank_whose_weights_stray_by_one_bit_ends_the_run(ranks: list[WorkerProcess]) -> None:
    for answer in answers(ranks, ("equal", 2.0**-23)):
        assert isinstance(answer, Failed) and not answer.peer
        assert "weights of drafter ranks [1] are not those of rank 0 any more" in answer.error


def test_the_killed_rank_is_named_not_the_one_that_misses_it(ranks: list[WorkerProcess]) -> None:
    feed, pool = Prefetcher(iter([]), 1), FeaturePool(2, 1, 1, torch.float32)
    work = Work([PlannedStep(1, 0, 0, range(2), save=False)], feed)
    saves: Any = None  # no checkpoint is planned
    coordinator = Coordinator([], ranks, pool, work, FlowConfig(), saves=saves, telemetry=RemoteObserver())
    try:
        with pytest.raises(StageError, match="stage drafter 1 was killed by SIGKILL while working on nothing"):
            coordinator._prepare()
            ranks[0].send(("meet",))
            os.kill(ranks[1].process.pid or 0, signal.SIGKILL)
            ranks[1].process.join()
            while not ranks[0].connection.poll(0.1):
                pass
            ranks[0].lost_peer = False
            list(coordinator._receive(ranks[0]))
            assert ranks[0].lost_peer
            list(coordinator._listen())
    finally:
        feed.close()
