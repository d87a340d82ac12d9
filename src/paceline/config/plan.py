"""Settings of the epoch plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.section import Section


class PlanConfig(Section):
    """How samples become micro-batches and micro-batches become optimizer steps."""

    strategy: Literal["grid"] = "grid"
    """How batches are composed."""
    schedule: Literal["stratified"] = "stratified"
    """How batches are ordered into windows."""
    token_budget: int = Field(default=49_152, ge=1)
    """Padded context tokens of a micro-batch at most (the target's work)."""
    max_samples: int = Field(default=64, ge=1)
    """Samples of a micro-batch at most."""
    draft_position_budget: int | None = Field(default=None, ge=1)
    """Anchors × block size of a micro-batch at most (the drafter's work). Unset: no limit."""
    width_multiple: int = Field(default=64, ge=1)
    """Padded widths are multiples of this many tokens."""
    accumulate: int = Field(default=4, ge=1)
    """Micro-batches of one optimizer step and drafter replica."""
