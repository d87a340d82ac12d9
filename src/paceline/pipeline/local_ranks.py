"""Which part of every window is trained on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LocalRanks:
    """The part of every window that this machine's drafter ranks train.

    Attributes:
        first_rank: of this machine.
        num_ranks: of all machines; None: as many as there are here.
        machines: how many machines train together.
        error: what ended the run on another machine; None while all are well.
    """

    first_rank: int = 0
    num_ranks: int | None = None
    machines: int = 1
    error: Callable[[], str | None] = lambda: None

    @property
    def writes(self) -> bool:
        """Whether checkpoints are written on this machine."""
        return self.first_rank == 0
