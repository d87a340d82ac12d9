"""Which checkpoints are kept: the newest, every so many steps, and the best by a metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

VALIDATION, DECODE = "validation/", "decode/"
"""How the names of metrics begin that are measured on held-out samples: by validation, by real decoding."""


@dataclass(frozen=True, slots=True)
class Best:
    """How the best is found.

    Attributes:
        metric: name in the metric catalogue.
        better: which values are.
    """

    metric: str
    better: Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint and the value of the metric that was measured for it; None where none was."""

    step: int
    value: float | None = None


def kept(
    candidates: Sequence[Candidate], *, keep_last: int, keep_every: int | None, keep_best: Best | None
) -> set[int]:
    """Steps of the checkpoints to keep.

    Args:
        candidates: all that there are.
        keep_last: this many newest.
        keep_every: those whose step is a multiple of it; None for none.
        keep_best: the best by this; of equals the oldest, and one without a number never. None for none.
    """
    steps = sorted(candidate.step for candidate in candidates)
    keep = set(steps[-keep_last:])
    if keep_every is not None:
        keep |= {step for step in steps if step % keep_every == 0}
    best = best_candidate(candidates, keep_best) if keep_best is not None else None
    return keep if best is None else keep | {best.step}


def best_candidate(candidates: Sequence[Candidate], best: Best) -> Candidate | None:
    """The best checkpoint: of equals the oldest; None where none has a number."""
    sign = 1.0 if best.better == "lower" else -1.0
    measured = [(sign * c.value, c.step, c) for c in candidates if c.value is not None and math.isfinite(c.value)]
    return min(measured)[2] if measured else None
