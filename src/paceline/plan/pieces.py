"""An epoch whose plan changed on the way: what the earlier plans left is planned anew, nothing twice.

Each piece is a whole plan of the samples that were left, of which some first windows are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.plan.epoch import EpochPlan
from paceline.types import PlannedBatch


@dataclass(frozen=True)
class PlanPiece:
    """The trained part of one plan.

    Attributes:
        plan: of the samples that were left, without the windows that are not trained; its row i is row ``rows[i]``.
        rows: of the store, int64; None where the plan is of all rows.
        first_batch, first_window: places in the epoch of its first ones.
    """

    plan: EpochPlan
    rows: np.ndarray | None
    first_batch: int
    first_window: int

    def trained_rows(self) -> np.ndarray:
        """Rows of the store that the piece trains, int64."""
        batches = self.plan.batches
        starts, ends = batches.offsets[self.plan.sequence], batches.offsets[self.plan.sequence + 1]
        taken = [batches.order[start:end] for start, end in zip(starts, ends, strict=True)]
        own = np.concatenate([*taken, np.zeros(0, batches.order.dtype)]).astype(np.int64)
        return own if self.rows is None else self.rows[own]


def cut(plan: EpochPlan, windows: int | None) -> EpochPlan:
    """The plan with its first windows alone; None: all of it."""
    return plan if windows is None else replace(plan, sequence=plan.sequence[: windows * plan.window_size])


@dataclass(frozen=True)
class PiecedEpoch:
    """The pieces of an epoch as one plan.

    Attributes:
        pieces: in training order, at least one.
        edges: upper ends of the buckets of the last piece's plan over all rows, int64.
    """

    pieces: Sequence[PlanPiece]
    edges: np.ndarray

    @property
    def num_windows(self) -> int:
        """Optimizer steps of the epoch."""
        return sum(piece.plan.num_windows for piece in self.pieces)

    @property
    def num_batches(self) -> int:
        """Micro-batches of the epoch."""
        return sum(piece.plan.num_batches for piece in self.pieces)

    @property
    def num_samples(self) -> int:
        """Entries that are trained in this epoch, repeats counted."""
        return sum(piece.plan.num_samples for piece in self.pieces)

    def window(self, index: int) -> range:
        """Places of one window's batches in training order."""
        piece = next(piece for piece in reversed(self.pieces) if piece.first_window <= index)
        own = piece.plan.window(index - piece.first_window)
        return range(own.start + piece.first_batch, own.stop + piece.first_batch)

    def batch(self, index: int) -> PlannedBatch:
        """The micro-batch at a place in training order."""
        piece = next(piece for piece in reversed(self.pieces) if piece.first_batch <= index)
        found = piece.plan.batch(index - piece.first_batch)
        rows = found.rows if piece.rows is None else piece.rows[found.rows]
        return replace(found, index=index, window=found.window + piece.first_window, rows=rows)
