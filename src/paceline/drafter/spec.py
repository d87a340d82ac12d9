"""What a drafter is, every number written out. No torch: the command line and exports read it.

`derive_spec` fills what the settings leave unset from the target's facts and refuses what no server could load;
nothing of the target is inherited silently afterwards (partial or multi-axis rotary embeddings never are).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from paceline.config.learning import DrafterConfig
from paceline.errors import DrafterError
from paceline.types import TargetFacts, differing_parts

LayerKind = Literal["full", "sliding"]


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """Architecture of one drafter.

    Attributes:
        num_layers: draft layers.
        block_size: slots of a block; slot 0 holds the anchor.
        hidden_size: width, the target's.
        intermediate_size: width of the gated MLP.
        num_attention_heads, num_key_value_heads, head_dim: attention; query heads share keys in groups.
        layers: "full" or "sliding" per draft layer.
        causal: per draft layer, whether a slot sees only itself and earlier slots of its block.
        sliding_window: window of the sliding layers in tokens, measured from the query; None without sliding layers.
        rope_theta: base of the rotary embedding over the whole head.
        rms_norm_eps: epsilon of the norms.
        vocab_size: rows of the target's embedding and head.
        mask_token_id: token in the draft slots.
        taps: tapped target layers; id i is the output of 0-based decoder layer i.
        num_target_layers: decoder layers of the target.
        sample_from_anchor: slot k drafts token k + 1 after the anchor (block_size drafts) instead of token k
            (block_size - 1 drafts).
        max_position_embeddings: longest position that servers may ask for.
        initializer_range: standard deviation of new weights.
        bos_token_id, eos_token_ids, pad_token_id: the target's, for exports.
    """

    num_layers: int
    block_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layers: tuple[LayerKind, ...]
    causal: tuple[bool, ...]
    sliding_window: int | None
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    num_target_layers: int
    sample_from_anchor: bool = False
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        errors = _errors(self)
        if errors:
            raise DrafterError(*errors)

    @property
    def first_draft_slot(self) -> int:
        """Slot that holds the first draft: 0 when sampling from the anchor, else 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size - self.first_draft_slot

    def window(self, layer: int) -> int | None:
        """Window of a draft layer in tokens; None for full attention."""
        return self.sliding_window if self.layers[layer] == "sliding" else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON or YAML; `from_dict` reads them back to an equal spec."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> DrafterSpec:
        """Spec from what `to_dict` wrote.

        Raises:
            DrafterError: keys are missing or unknown, or the numbers make no drafter.
        """
        known = {field.name for field in fields(DrafterSpec)}
        odd = sorted(set(values) ^ known)
        if odd:
            raise DrafterError(f"drafter spec: keys missing or unknown: {', '.join(odd)}; write it with to_dict")
        arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return DrafterSpec(**arguments)


def target_differences(
    spec: DrafterSpec,
    facts: TargetFacts,
    *,
    taps: Sequence[int] | None = None,
    identity: Mapping[str, str] | None = None,
) -> list[str]:
    """Why a drafter does not belong to a target: one phrase for each difference, none where it does.

    The one place that compares the two; who asks adds where the drafter is from and what to do.

    Args:
        spec: the drafter.
        facts: the target.
        taps: of the loaded target; None: not compared.
        identity: of the target that the drafter was trained on, part by part; None: not known, not compared.
    """
    pairs: dict[str, tuple[Any, Any]] = {
        "hidden_size": (spec.hidden_size, facts.hidden_size),
        "vocab_size": (spec.vocab_size, facts.vocab_size),
        "num_target_layers": (spec.num_target_layers, facts.num_layers),
    }
    if taps is not None:
        pairs["taps"] = (list(spec.taps), list(taps))
    found = [
        f"{name} {ours}, but the target {facts.path} has {theirs}"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
    if identity and (parts := differing_parts(identity, facts.identity)):
        found.append(f"trained on another target than {facts.path}; they differ in {', '.join(parts)}")
    return found


def derive_spec(
    config: DrafterConfig, facts: TargetFacts, taps: Sequence[int], mask_token_id: int | None
) -> DrafterSpec:
    """The drafter of a target.

    Args:
        config: settings; what they leave unset is taken from the target.
        facts: the target.
        taps: tapped layers, 0-based.
        mask_token_id: of the run, or None; an id in `config.mask_token_id` goes first.

    Raises:
        DrafterError: one line per error.
    """
    mask = config.mask_token_id if isinstance(config.mask_token_id, int) else mask_token_id
    errors = _mask_errors(mask, facts)
    shape: dict[str, Any] = {}
    for name in (
        *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("rope_theta", "rms_norm_eps", "max_position_embeddings"),
    ):
        own = getattr(config, name)
        shape[name] = own if own is not None else getattr(facts, name)
    heads = shape["num_attention_heads"]
    if shape["num_key_value_heads"] is None:
        shape["num_key_value_heads"] = heads
    if shape["head_dim"] is None and heads:
        shape["head_dim"] = facts.hidden_size // heads
    unset = [name for name, value in shape.items() if value is None]
    errors += [f"drafter.{name}: unset, and the target does not say it; give drafter.{name}" for name in unset]
    errors += _size_errors(shape)
    if errors:
        raise DrafterError(*errors)
    assert mask is not None
    return DrafterSpec(
        num_layers=config.num_layers,
        block_size=config.block_size,
        hidden_size=facts.hidden_size,
        layers=tuple(kind for kind, _ in config.layer_kinds()),
        causal=tuple(causal for _, causal in config.layer_kinds()),
        sliding_window=config.sliding_window,
        vocab_size=facts.vocab_size,
        mask_token_id=mask,
        taps=tuple(taps),
        num_target_layers=facts.num_layers,
        sample_from_anchor=config.sample_from_anchor,
        initializer_range=config.initializer_range or facts.initializer_range or 0.02,
        bos_token_id=facts.bos_token_id,
        eos_token_ids=tuple(facts.eos_token_ids),
        pad_token_id=facts.pad_token_id,
        **shape,
    )


def _mask_errors(mask: int | None, facts: TargetFacts) -> list[str]:
    if mask is None:
        return ["drafter.mask_token_id: unset, and the tokenizer has no mask token; give an unused id of the embedding"]
    roles = [("pad", facts.pad_token_id), ("bos", facts.bos_token_id), *(("eos", eos) for eos in facts.eos_token_ids)]
    taken = [role for role, token in roles if token == mask]
    if taken:
        return [
            f"drafter.mask_token_id = {mask}: is the target's {' and '.join(dict.fromkeys(taken))} token, which means "
            "something else to it; give it its own id"
        ]
    if not 0 <= mask < facts.vocab_size:
        return [
            f"drafter.mask_token_id = {mask}: outside the target's embedding; "
            f"allowed: 0 to {facts.vocab_size - 1}; give an unused id"
        ]
    return []


def _size_errors(shape: Mapping[str, Any]) -> list[str]:
    """What the sizes of attention heads have against each other, with values that can be used."""
    heads, groups, size = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    errors = []
    if heads and groups and heads % groups:
        near = groups * max(1, round(heads / groups))
        allowed = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        errors.append(
            f"drafter.num_attention_heads = {heads}: not a multiple of drafter.num_key_value_heads = {groups}; set "
            f"drafter.num_attention_heads: {near}, or drafter.num_key_value_heads to one of {allowed}"
        )
    if size and size % 2:
        errors.append(
            f"drafter.head_dim = {size}: rotary embeddings need an even size; for example drafter.head_dim: {size + 1}"
        )
    return errors


def _errors(spec: DrafterSpec) -> list[str]:
    errors = []
    if spec.block_size < 2:
        errors.append(f"block_size = {spec.block_size}: a block of one slot drafts nothing; allowed: 2 or more")
    if len(spec.layers) != spec.num_layers or len(spec.causal) != spec.num_layers:
        errors.append(f"layers and causal must list one value for each of the {spec.num_layers} draft layers")
    if ("sliding" in spec.layers) != (spec.sliding_window is not None):
        errors.append("sliding_window must be given exactly when a layer is sliding")
    if spec.num_attention_heads % max(1, spec.num_key_value_heads):
        errors.append(
            f"num_attention_heads = {spec.num_attention_heads}: must be a multiple of num_key_value_heads "
            f"{spec.num_key_value_heads}"
        )
    if spec.head_dim % 2:
        errors.append(f"head_dim = {spec.head_dim}: rotary embeddings need an even size")
    if not 0 <= spec.mask_token_id < spec.vocab_size:
        errors.append(f"mask_token_id = {spec.mask_token_id}: outside the embedding of {spec.vocab_size} rows")
    if not spec.taps:
        errors.append("taps: none; give at least one target layer")
    outside = [tap for tap in spec.taps if not 0 <= tap < spec.num_target_layers]
    if outside:
        errors.append(f"taps {outside}: outside the target's {spec.num_target_layers} layers, counted from 0")
    if len(set(spec.taps)) != len(spec.taps):
        errors.append(f"taps {list(spec.taps)}: each layer may be tapped once")
    return errors
