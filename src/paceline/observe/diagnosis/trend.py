"""Whether a noisy series still moves: slope of its last part, with a confidence interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCKS = 12
"""Stretches whose means are regressed: neighbouring steps are correlated, means of long stretches hardly are."""
MIN_POINTS = 8
"""Fewer points than this have no trend; so many are regressed in stretches of two."""
T_QUANTILES = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
"""97.5 % quantiles of Student's t by degrees of freedom: stretches less two."""


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
        None where there are fewer than `MIN_POINTS` points. Of short series at least half is taken.
    """
    good = np.isfinite(values)
    steps, values = steps[good], values[good]
    count = max(int(steps.size * part), min(max(steps.size // 2, MIN_POINTS), 2 * BLOCKS))
    if steps.size < MIN_POINTS:
        return None
    blocks = min(BLOCKS, count // 2)
    x = np.array([part.mean() for part in np.array_split(steps[-count:].astype(np.float64), blocks)])
    y = np.array([part.mean() for part in np.array_split(values[-count:], blocks)])
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    rest = y - y.mean() - slope * centred
    error = T_QUANTILES[blocks - 2] * float(np.sqrt(rest @ rest / (blocks - 2) / (centred @ centred)))
    return Trend(int(steps[-1] - steps[-count] + 1), slope, error)
