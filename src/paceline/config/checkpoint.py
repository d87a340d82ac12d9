"""Settings of checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.section import Section


class CheckpointConfig(Section):
    """When the run's state is written, and how much of it is kept."""

    every_steps: int = Field(default=500, ge=1)
    """Optimizer steps between checkpoints; the last step always writes one."""
    every_minutes: float | None = Field(default=None, gt=0)
    """Minutes after which one is written too, counted from the one before. Unset: by steps alone."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of this are never removed. Unset: none."""
    keep_best: str | None = None
    """Metric by which the best checkpoint is never removed, such as validation/loss. Unset: none."""
    export: Literal["none", "zlab", "speculators"] = "none"
    """Drafter folder that is written with each checkpoint, to export/step-NUMBER in the run directory, and removed
    with it."""
