"""Settings of the objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.section import Section


class ObjectiveConfig(Section):
    """What the drafter minimises."""

    name: Literal["decay", "dpace"] = "decay"
    """Slot weights of the loss: exp(-(k-1)/gamma) on slot k, or D-PACE, the drafter's own chance to get that far."""
    gamma: float | None = Field(default=None, gt=0)
    """Decay length in slots. Unset: 7, 5, 4 for blocks of 16, 10, 8, and in proportion otherwise."""
    alpha: float = Field(default=0.5, ge=0, le=1)
    """Smoothing of D-PACE: 0 takes the drafter's probabilities as they are, 1 ignores them."""
    weighting: Literal["token", "anchor", "sample"] = "token"
    """What counts equally over the whole window: every supervised slot, every anchor, or every sample."""
