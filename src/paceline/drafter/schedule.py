"""Values that change over a run: one primitive for the learning rate, γ, noise and the mixture of losses. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.config.learning import RampConfig

Shape = Literal["constant", "linear", "cosine", "wsd"]

WSD_DECAY = 0.2
"""Share of the steps over which wsd falls, at the end."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """From `start` to `end` between two steps, after an optional linear rise from zero.

    Attributes:
        shape: constant (stays at `start`), linear, cosine (half a period), or wsd (stays, then falls linearly over the
            last fifth).
        start, end: values at `first_step` + `warmup` and at `last_step`; up or down.
        first_step, last_step: 0-based steps; before and after them the value stays.
        warmup: steps of the rise; step `first_step` already has a share of 1 / (warmup + 1).
    """

    shape: Shape
    start: float
    end: float
    first_step: int
    last_step: int
    warmup: int = 0

    def at(self, step: int) -> float:
        """The value in a 0-based step."""
        since = step - self.first_step
        if since < self.warmup:
            return self.start * (max(since, 0) + 1) / (self.warmup + 1)
        span = max(1, self.last_step - self.first_step - self.warmup)
        share = min(1.0, max(0.0, (since - self.warmup) / span))
        if self.shape == "constant":
            return self.start
        if self.shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        elif self.shape == "wsd":
            share = max(0.0, (share - (1 - WSD_DECAY)) / WSD_DECAY)
        return self.start + (self.end - self.start) * share


def ramp(config: RampConfig, start: float, end: float | None, total_steps: int) -> Schedule:
    """From `start` to `end` (None: no way to go) between the steps of a ramp; unset, its last step is the run's."""
    last = config.last_step if config.last_step is not None else max(1, total_steps - 1)
    return Schedule(config.ramp, start, start if end is None else end, config.first_step, last)
