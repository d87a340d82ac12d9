"""Stages that are ranks of one group, for tests: they compare weights, share state, and miss one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from paceline.drafter.distributed import any_rank, broadcast_state, check_equal, collective_errors
from paceline.pipeline.multinode import RankInfo
from paceline.pipeline.process import Stage


class RankStage(Stage):
    """Does with the other ranks what a message names; answers with what came of it."""

    def __init__(self, group: RankInfo) -> None:
        self.rank, self.world = group.rank, group.join("cpu")

    def handle(self, message: Any) -> Iterator[Any]:
        name, *values = message
        weights = [torch.arange(6.0).view(2, 3), torch.ones(4)]
        if name == "equal":
            if self.rank == 1:
                weights[1][2] += values[0]
            check_equal(weights, self.world)
            yield "equal"
        elif name == "spread":
            mine = {"a": [weights[0] + self.rank, {"n": self.rank}], "b": (torch.full((), self.rank), "text")}
            yield broadcast_state(mine, self.world, torch.device("cpu"))
        elif name == "asks":
            yield any_rank(self.rank in values, self.world, torch.device("cpu"))
        elif name == "meet":
            with collective_errors():
                dist.barrier(group=self.world)
            yield "met"
