"""Settings of the objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.ramp import RampConfig

TermName = Literal["ce", "kl", "tv", "lk"]


class ObjectiveConfig(RampConfig):
    """What the drafter minimises: a weighted sum of terms in every slot, times the slot's weight."""

    name: Literal["decay", "dpace"] = "decay"
    """Slot weights: exp(-(k-1)/gamma) on slot k, or D-PACE, the drafter's own chance to get that far."""
    terms: dict[TermName, float] = {"ce": 1.0}
    """Terms and their shares: ce (cross entropy of the label); against the target's own distributions kl, tv, lk."""
    terms_end: dict[TermName, float] | None = None
    """Shares at `last_step`. Unset: `terms` throughout."""
    gamma: float | None = Field(default=None, ge=0.01, le=1e6)
    """Decay length in slots. Unset: 7, 5, 4 for blocks of 16, 10, 8, and in proportion otherwise."""
    gamma_end: float | None = Field(default=None, ge=0.01, le=1e6)
    """Decay length at `last_step`. Unset: the same throughout."""
    alpha: float = Field(default=0.5, ge=0, le=1)
    """Smoothing of D-PACE: 0 takes the drafter's probabilities as they are, 1 ignores them."""
    weighting: Literal["token", "anchor", "sample"] = "token"
    """What counts equally over the whole window: every supervised slot, every anchor, or every sample."""

    @property
    def needs_teacher(self) -> bool:
        """Whether a term compares with the target's distributions, for which its last hidden states must be sent."""
        return any(
            name != "ce" and share for terms in (self.terms, self.terms_end or {}) for name, share in terms.items()
        )

    @model_validator(mode="after")
    def _fits(self) -> ObjectiveConfig:
        for key, terms in (("terms", self.terms), ("terms_end", self.terms_end)):
            if terms is not None and (min(terms.values(), default=0.0) < 0 or sum(terms.values()) <= 0):
                raise ValueError(f"{key} must have no negative share and one above 0, for example {{ce: 1.0}}")
        if self.name == "dpace" and (self.gamma is not None or self.gamma_end is not None):
            raise ValueError("gamma has no part in dpace weights; drop it, or set name to decay")
        return self
