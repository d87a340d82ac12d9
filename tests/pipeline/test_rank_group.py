"""Ranks of one group: equal weights or none, one state at the start, and who is to blame when one is missing."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rank_group
from paceline.errors import StageError
from paceline.pipeline.coordinator import Coordinator
from paceline.pipeline.messages import Failed, Ready
from paceline.pipeline.multinode import RankInfo
from paceline.pipeline.prefetch import Prefetcher
from paceline.pipeline.process import WorkerProcess
from paceline.types import PlannedStep


@pytest.fixture
def ranks() -> Generator[list[WorkerProcess], None, None]:
    """Two ranks that have found one another."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [RankInfo("127.0.0.1", meeting.port, "test", rank, 2, False) for rank in range(2)]
    workers = [WorkerProcess(f"drafter {n}", rank_group.RankStage, (place,)) for n, place in enumerate(places)]
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
    orders, feed = [PlannedStep(1, 0, 0, range(2), save=False)], Prefetcher(iter([]), 1)
    hub = Coordinator([], ranks, num_buffers=2, feed=feed, orders=orders, delivery="ready", stall_limit_s=60.0)
    try:
        with pytest.raises(StageError, match="stage drafter 1 was killed by SIGKILL while working on nothing"):
            for _ in hub._await_ready():
                raise AssertionError("no step was taken")
            ranks[0].send(("meet",))
            os.kill(ranks[1].process.pid or 0, signal.SIGKILL)
            ranks[1].process.join()
            while not ranks[0].connection.poll(0.1):
                pass
            ranks[0].lost_peer = False
            list(hub._receive(ranks[0]))
            assert ranks[0].lost_peer
            list(hub._listen())
    finally:
        feed.close()
