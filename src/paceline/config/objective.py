"""Settings of the objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.section import Section


class ObjectiveConfig(Section):
    """What the drafter minimises."""

    name: Literal["decay"] = "decay"
    """Cross entropy with weights exp(-(k-1)/gamma) on slot k."""
    gamma: float | None = Field(default=None, gt=0)
    """Decay length in slots. Unset: 7, 5, 4 for blocks of 16, 10, 8, and in proportion otherwise."""
    weighting: Literal["token", "anchor", "sample"] = "token"
    """What counts equally over the whole window: every supervised slot, every anchor, or every sample."""
