"""Settings of the epoch plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.section import Section

Strategy = Literal["grid", "sorted", "shuffled", "jittered", "windowed", "bucketed", "mixed", "packed"]
Schedule = Literal["stratified", "proportional", "diverse", "round_robin", "shuffled", "curriculum"]

MOST = 2**31 - 1
"""Tokens, widths and samples are counted in 31 bits."""


class PlanConfig(Section):
    """How samples become micro-batches and micro-batches become optimizer steps."""

    strategy: Strategy = "grid"
    """How batches are composed; grid (shuffled anew inside fine length classes) wastes least and re-pairs least."""
    schedule: Schedule = "stratified"
    """How batches are ordered into windows; stratified puts one batch of every length stratum into each window."""
    token_budget: int = Field(default=49_152, ge=1, le=MOST)
    """Padded context tokens of a micro-batch at most (the target's work)."""
    max_samples: int = Field(default=64, ge=1, le=MOST)
    """Samples of a micro-batch at most."""
    draft_position_budget: int | None = Field(default=None, ge=1, le=MOST)
    """Anchors × block size of a micro-batch at most (the drafter's work). Unset: no limit."""
    width_multiple: int = Field(default=64, ge=1, le=MOST)
    """Padded widths are multiples of this many tokens."""
    attention_length: int | None = Field(default=None, ge=1, le=MOST)
    """Tokens at which attention costs as much as the rest: width w counts as w + w²/this. Unset: as w."""
    accumulate: int = Field(default=4, ge=1, le=65_535)
    """Micro-batches of one optimizer step and drafter replica."""
    leftover: Literal["short", "carry"] = "short"
    """Batches that fill no whole window: one short, correctly normalised window, or carried into the next epoch."""
    max_length: int | None = Field(default=None, ge=1, le=MOST)
    """Samples longer than this many tokens are over-length. Unset: none is."""
    on_over_length: Literal["drop", "keep"] = "drop"
    """Leave over-length samples out, or plan them like all others; both are counted and reported."""
    without_anchors: Literal["drop", "keep"] = "drop"
    """Leave out samples without any eligible anchor (they carry no loss), or plan them; both are counted."""
    eligible_share: float = Field(default=1.0, gt=0, le=1)
    """Eligible anchors per token, where their counts are unknown."""
    weights: dict[str, float] = {}
    """How often the samples of a tag or source are planned an epoch (0.5, 2, ...), by name; others once."""
    edges: list[int] | Literal["optimal"] | None = None
    """Upper ends of the buckets in tokens, ascending; or the best `num_buckets` ones. Unset: equal sample counts."""
    num_buckets: int = Field(default=6, ge=1, le=256)
    """Buckets of the bucketed and mixed strategies, of the schedules by bucket, and of the reports."""
    grid_class_batches: int = Field(default=4, ge=1, le=1_000_000)
    """Strategy grid: neighbouring widths share a class until it fills this many batches, where that wastes little."""
    jitter: float = Field(default=0.05, ge=0, le=1)
    """Strategy jittered: standard deviation of the relative perturbation of the lengths before they are sorted."""
    sort_window: int = Field(default=2048, ge=1, le=MOST)
    """Strategy windowed: samples that are sorted together."""
    mixed_span: int = Field(default=2, ge=1, le=256)
    """Strategy mixed: neighbouring buckets that one batch may draw from."""
    antithetic: bool = True
    """Schedule stratified: the window with the longest batches so far takes the shortest of the next stratum."""
    curriculum_epochs: int = Field(default=1, ge=1, le=1_000_000)
    """Schedule curriculum: epochs that begin with short samples; the later ones are stratified throughout."""
    curriculum_share: float = Field(default=0.5, gt=0, le=1)
    """Schedule curriculum: share of such an epoch that goes from short to long; the rest of it is stratified."""
    curriculum_stages: int = Field(default=8, ge=1, le=10_000)
    """Schedule curriculum: stages between short and long; inside a stage the order is stratified."""

    @model_validator(mode="after")
    def _edges_increase(self) -> PlanConfig:
        if isinstance(self.edges, list):
            if not self.edges:
                raise ValueError("edges is empty; list the upper end of every bucket in tokens, or leave it unset")
            if self.edges[0] < 1:
                raise ValueError(f"edges starts with {self.edges[0]}; an upper end is at least 1 token")
            for left, right in zip(self.edges, self.edges[1:], strict=False):
                if right <= left:
                    raise ValueError(f"edges do not increase: {right} follows {left}; list them ascending")
            if self.edges[-1] > MOST:
                raise ValueError(f"edges ends with {self.edges[-1]}; an upper end is at most {MOST} tokens")
            if len(self.edges) > 65_536:
                raise ValueError(f"edges lists {len(self.edges)} buckets; at most 65536 are possible")
        for name, weight in self.weights.items():
            if not 0 <= weight <= 1e6:
                raise ValueError(
                    f"weights: {name} has {weight}; a weight is 0 or more passes an epoch, at most 1000000"
                )
        return self
