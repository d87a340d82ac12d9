"""Gradient spikes, named while the step is at hand: place in the plan, samples, and those with the highest loss."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from paceline.types import StepReport

MEMORY_STEPS = 200
"""Recent steps that say what gradient norm is usual."""
MIN_STEPS = 20
"""Fewer steps than this are not judged."""
STRETCH, NEIGHBOURS = 10, 25
"""Norms that are judged together, and those before and behind that say what is usual for them."""
MAX_SAMPLES = 64
"""Samples that one spike lists."""
MAX_SPIKES = 100
"""Spikes that are noted in one start of a run."""


def limit_of(norms: np.ndarray) -> tuple[float, float]:
    """The usual norm and the one above which a step is a spike.

    Eight deviations above the median: not one in 10^15 draws of a normal distribution, so heavy tails alone do not fill
    the list; and three medians, where the deviation is next to nothing.
    """
    middle = float(np.median(norms))
    spread = float(np.median(np.abs(norms - middle))) * 1.4826  # the deviation of a normal distribution
    return middle, max(middle + 8 * spread, 3 * middle)


def spikes_of(norms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of many norms stand out among their neighbours, for a norm that falls as a run learns has no one level.

    Args:
        norms: finite, in order, [n].

    Returns:
        Indices of the spikes, ascending, and the usual norm there.
    """
    found: list[np.ndarray] = []
    usual: list[np.ndarray] = []
    for start in range(0, norms.size, STRETCH):
        near = norms[max(start - NEIGHBOURS, 0) : start + STRETCH + NEIGHBOURS]
        middle, limit = limit_of(near)
        high = start + np.flatnonzero(norms[start : start + STRETCH] > limit)
        found.append(high)
        usual.append(np.full(high.size, middle))
    return np.concatenate(found), np.concatenate(usual)


class SpikeWatch:
    """Sees every step and describes those whose gradient stands out.

    Args:
        total_steps: optimizer steps planned; the first twentieth has large gradients of its own.
    """

    def __init__(self, total_steps: int) -> None:
        self._first = max(MIN_STEPS, total_steps // 20)
        self._norms: deque[float] = deque(maxlen=MEMORY_STEPS)
        self._left = MAX_SPIKES

    def see(self, report: StepReport) -> dict[str, Any] | None:
        """What is to be noted of a step: norms, place, rows and the rows with the highest loss; None for most steps."""
        norm = report.gradient_norm
        if report.skipped or not np.isfinite(norm):
            return None
        usual, limit = limit_of(np.array(self._norms)) if len(self._norms) >= MIN_STEPS else (norm, norm)
        self._norms.append(norm)
        if norm <= limit or report.step <= self._first or not self._left:
            return None
        self._left -= 1
        return {
            "norm": norm,
            "usual": usual,
            "epoch": report.epoch,
            "window": report.window,
            "batches": list(report.batches),
            "samples": [int(row) for rows in report.rows.values() for row in rows][:MAX_SAMPLES],
            "highest_loss": _highest(report),
        }


def _highest(report: StepReport, count: int = 3) -> dict[str, float]:
    """Row number and loss of the samples with the highest loss of their own, highest first."""
    losses: dict[int, float] = {}
    for index, rows in report.rows.items():
        sums = report.sample_losses.get(index)
        if sums is not None and len(sums) == len(rows):
            losses |= {
                int(row): float(loss / weight) for row, (loss, weight) in zip(rows, sums, strict=True) if weight > 0
            }
    highest = sorted(losses, key=lambda row: losses[row], reverse=True)[:count]
    return {str(row): round(losses[row], 4) for row in highest}
