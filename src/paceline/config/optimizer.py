"""Settings of the optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.section import Section


class OptimizerConfig(Section):
    """The update of the float32 master weights."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW for everything, or Muon for the matrices and AdamW for the norms."""
    lr: float = Field(default=6e-4, gt=0, le=10)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of the matrices; norms have none."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape of the learning rate after warm-up; wsd is stable and then decays over its last fifth."""
    warmup: float = Field(default=0.04, ge=0, lt=1)
    """Share of all steps over which the learning rate rises from zero."""
    final_lr: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end as a share of the peak."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradient norm above which the gradient is scaled down."""
    max_skipped_steps: int = Field(default=5, ge=1)
    """Steps with a non-finite gradient are skipped and counted; this many in a row stop the run."""
