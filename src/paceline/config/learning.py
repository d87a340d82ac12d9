"""Settings of the drafter's shape, of how it computes, and of how it learns: drafter, objective, optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.section import Section

TermName = Literal["ce", "kl", "tv", "lk"]


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


class NoiseConfig(RampConfig):
    """Noise on the features in training, against relying on their last digits; evaluation and validation have none."""

    kind: Literal["none", "gaussian", "uniform"] = "none"
    """Distribution of the noise."""
    ratio: float = Field(default=0.05, ge=0, le=100)
    """RMS of the noise as a share of the RMS of each token's features, tap by tap."""
    ratio_end: float | None = Field(default=None, ge=0, le=100)
    """The share at `last_step`, up or down. Unset: `ratio` throughout."""


class DrafterConfig(Section):
    """Shape of the drafter. What is unset is taken from the target and written out in the resolved configuration."""

    num_layers: int = Field(default=5, ge=1)
    """Draft layers."""
    block_size: int = Field(default=16, ge=2)
    """Slots of a block; slot 0 holds the anchor, the others are drafts."""
    num_anchors: int = Field(default=512, ge=1, le=2**31 - 1)
    """At most this many anchors a sample and epoch."""
    mask_token_id: int | str | None = None
    """Token in the draft slots, as id or as text. Unset: the tokenizer's own mask token, else a spare one."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLP."""
    num_attention_heads: int | None = Field(default=None, ge=1)
    """Query heads."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """Key and value heads."""
    head_dim: int | None = Field(default=None, ge=2)
    """Size of a head."""
    layers: list[Literal["full", "sliding"]] | None = None
    """Attention kind per draft layer. Unset: all full."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Window of the sliding layers in tokens, measured from the query."""
    causal: bool | list[bool] | None = None
    """Whether slots see only earlier slots of their block, for all layers or one a layer. Unset: full layers no, sliding layers yes."""  # noqa: E501
    sample_from_anchor: bool = False
    """Whether slot k drafts the token after it (slot 0 drafts the first) instead of its own; written into every checkpoint."""  # noqa: E501
    rope_theta: float | None = Field(default=None, ge=1, le=1e12)
    """Base of the rotary embedding."""
    rms_norm_eps: float | None = Field(default=None, gt=0, le=0.1)
    """Epsilon of the norms."""
    max_position_embeddings: int | None = Field(default=None, ge=1)
    """Longest position that servers may ask for."""
    initializer_range: float | None = Field(default=None, gt=0, le=10)
    """Standard deviation of the new weights. Unset: the target's, or 0.02 where it says nothing."""
    init: str | None = None
    """Drafter folder, z-lab or speculators, or training checkpoint of SpecForge, speculators, TorchSpec, DeepSpec or NeMo AutoModel, whose weights the run begins with. Unset: new weights."""  # noqa: E501
    init_step: int | None = Field(default=None, ge=1)
    """Optimizer steps that `init` has behind it: the run counts on from there, with the moments of AdamW where it has them. Unset: the run begins at step 0 with new moments."""  # noqa: E501
    init_epoch: int = Field(default=0, ge=0)
    """Whole epochs that `init` has behind it, with `init_step`: the run begins with the next one."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute type; master weights, rotary tables and losses are always float32."""
    attention: Literal["auto", "flex", "split", "dense"] = "auto"
    """Attention backend: flex on CUDA, split elsewhere; dense is the slow reference."""
    head: Literal["tiled", "liger"] = "tiled"
    """Who computes head and cross entropy: tiled (our own, any device), or liger-kernel (CUDA)."""
    head_chunk: int = Field(default=2048, ge=1)
    """Supervised slots whose logits exist at once."""
    positions_per_pass: int | None = Field(default=None, ge=1)
    """Draft positions that the drafter computes at once at most; larger micro-batches are split by sample, with the same gradient. Unset: as many as the card's memory holds; whole micro-batches on a CPU."""  # noqa: E501
    recompute: bool = False
    """Whether each draft layer is computed again in the backward pass instead of keeping what it computed: far less memory, about a quarter more work."""  # noqa: E501

    noise: NoiseConfig = NoiseConfig()
    """Noise on the features."""
    diagnose_every: int = Field(default=20, ge=0)
    """Optimizer steps between windows in which trees and top-k coverage are measured; 0: never."""
    diagnose_share: float = Field(default=0.05, gt=0, le=1)
    """Share of the blocks of such a window that are measured, evenly spread."""

    @model_validator(mode="after")
    def _layers_match(self) -> DrafterConfig:
        if self.init_step is not None and self.init is None:
            raise ValueError("init_step is set but init is not; give the folder that has these steps behind it")
        if self.init_epoch and self.init_step is None:
            raise ValueError(f"init_epoch {self.init_epoch} needs init_step, the optimizer steps of these epochs")
        if self.layers is not None and len(self.layers) != self.num_layers:
            raise ValueError(
                f"layers lists {len(self.layers)} kinds for num_layers {self.num_layers}; list one a layer"
            )
        if self.layers is not None and "sliding" in self.layers and self.sliding_window is None:
            raise ValueError("layers has sliding ones but sliding_window is unset; give the window in tokens")
        if self.sliding_window is not None and (self.layers is None or "sliding" not in self.layers):
            raise ValueError("sliding_window is set but no layer is sliding; list `layers` or drop the window")
        if isinstance(self.causal, list) and len(self.causal) != self.num_layers:
            raise ValueError(
                f"causal lists {len(self.causal)} values for num_layers {self.num_layers}; list one a layer"
            )
        unclear = any(kind == "sliding" and not causal for kind, causal in self.layer_kinds())
        if unclear and self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(
                f"sliding_window {self.sliding_window} is shorter than block_size {self.block_size} in a layer that is "
                "not causal, where servers disagree on later slots; use a window of at least a block"
            )
        return self

    def layer_kinds(self) -> list[tuple[Literal["full", "sliding"], bool]]:
        """(attention kind, causal) of every draft layer, defaults written out."""
        kinds = self.layers if self.layers is not None else ["full"] * self.num_layers
        if isinstance(self.causal, list):
            return list(zip(kinds, self.causal, strict=True))
        return [(kind, self.causal if self.causal is not None else kind == "sliding") for kind in kinds]


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


class OptimizerConfig(Section):
    """The update of the float32 master weights."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW for everything, or Muon for the matrices and AdamW for the norms."""
    state: Literal["float32", "8bit"] = "float32"
    """Type of AdamW's moments; 8bit (bitsandbytes) takes a quarter of the memory. Masters are always float32."""
    shard: bool = False
    """Whether each drafter rank of a machine holds only its part of the optimizer's state (torch's ZeRO)."""
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

    @model_validator(mode="after")
    def _state_fits(self) -> OptimizerConfig:
        if self.state == "8bit" and self.name == "muon":
            raise ValueError("state 8bit is AdamW's; Muon keeps one float32 state; set name to adamw, or drop state")
        return self
