"""Whether a noisy series still moves: slope of its last part, with a confidence interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCKS = 12
"""Stretches whose means are regressed: neighbouring steps are correlated, means of long stretches hardly are."""
T_QUANTILE = 2.228
"""97.5 % quantile of Student's t with BLOCKS - 2 degrees of freedom."""


@dataclass(frozen=True)
class Trend:
    """A straight line through the last part of a series.

    Attributes:
        steps: optimizer steps that it spans.
        slope: change a step.
        error: half width of the 95 % interval of the slope.
    """

    steps: int
    slope: float
    error: float

    @property
    def direction(self) -> str:
        """``falling``, ``rising`` or ``flat``: flat unless the interval excludes zero."""
        if abs(self.slope) <= self.error:
            return "flat"
        return "rising" if self.slope > 0 else "falling"

    @property
    def text(self) -> str:
        """The direction as in a sentence."""
        return "flat" if self.direction == "flat" else f"still {self.direction}"


def trend_of(steps: np.ndarray, values: np.ndarray, part: float = 0.3) -> Trend | None:
    """Trend of the last ``part`` of a series.

    Args:
        steps: ascending, [n].
        values: [n], NaN allowed.
        part: share of the points.

    Returns:
        None where there are fewer than two points a block.
    """
    good = np.isfinite(values)
    steps, values = steps[good], values[good]
    count = int(steps.size * part)
    if count < 2 * BLOCKS:
        return None
    x = np.array([part.mean() for part in np.array_split(steps[-count:].astype(np.float64), BLOCKS)])
    y = np.array([part.mean() for part in np.array_split(values[-count:], BLOCKS)])
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    rest = y - y.mean() - slope * centred
    error = T_QUANTILE * float(np.sqrt(rest @ rest / (BLOCKS - 2) / (centred @ centred)))
    return Trend(int(steps[-1] - steps[-count] + 1), slope, error)
