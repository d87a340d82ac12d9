"""The way from one value to another over a run, for whatever changes on it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.section import Section


class RampConfig(Section):
    """When values move to their `_end`, and in which shape; before and after they stand still."""

    ramp: Literal["linear", "cosine"] = "linear"
    """Shape of the way from each value to its `_end`."""
    first_step: int = Field(default=0, ge=0)
    """Optimizer step (0-based) at which the way begins."""
    last_step: int | None = Field(default=None, ge=1)
    """Optimizer step at which it ends. Unset: the last of the run."""

    @model_validator(mode="after")
    def _steps_ascend(self) -> RampConfig:
        if self.last_step is not None and self.last_step <= self.first_step:
            raise ValueError(f"last_step {self.last_step} must come after first_step {self.first_step}")
        return self
