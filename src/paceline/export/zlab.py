"""The z-lab folder: what z-lab `dflash`, SGLang and vLLM read. `config.json` and unprefixed tensors.

Causality has no key per layer there: without ``is_causal`` full layers are bidirectional and sliding ones causal;
with it, all layers are what it says. A drafter that fits neither is refused. The label convention has no key either:
slot k predicts token a + k. ``input_embedding_scale`` says what the target's first layer gets: this times the stored
embedding. z-lab `dflash` reads it, vLLM does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ExportError
from paceline.export.compatibility import build_spec, check_mask, check_target
from paceline.export.config_keys import (
    agreed,
    flag,
    integer,
    layer_ids,
    mapping,
    number,
    qwen3_section,
    read_config,
    shape_fields,
    write_config,
)
from paceline.export.engines import check_servable
from paceline.export.folder import appearing
from paceline.export.weights import SHARD_BYTES, check_shapes, in_dtype, read_weights, write_weights

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.drafter.spec import DrafterSpec
    from paceline.types import TargetFacts

ARCHITECTURE = "DFlashDraftModel"
SCALE = "input_embedding_scale"
KNOWN = {"mask_token_id", "target_layer_ids", "block_size", "causal", SCALE}
"""Keys of ``dflash_config`` that are understood; any other may change what the drafter computes and is refused."""


def zlab_config(spec: DrafterSpec, dtype: str, embedding_scale: float | None = 1.0) -> dict[str, Any]:
    """The folder's ``config.json``.

    Args:
        spec: the drafter.
        dtype: of the tensors.
        embedding_scale: the target's first layer gets this times the stored embedding; None where that is no multiple.

    Raises:
        ExportError: a causality, label convention or embedding that the format cannot say, or a drafter that no engine
            serves as trained.
    """
    check_servable(spec)
    if embedding_scale is None:
        raise ExportError(
            "format zlab: the target's first layer gets more than a multiple of its embedding, which has no key; "
            "export with --format speculators"
        )
    if spec.sample_from_anchor:
        raise ExportError(
            "format zlab: has no key for sample_from_anchor, readers would shift every draft by one; "
            "export with --format speculators"
        )
    config = {
        "architectures": [ARCHITECTURE],
        "block_size": spec.block_size,
        "dflash_config": {
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.taps),
            **({} if embedding_scale == 1 else {SCALE: embedding_scale}),
        },
        "num_target_layers": spec.num_target_layers,
        **qwen3_section(spec, dtype),
    }
    causal = _is_causal(spec)
    return config if causal is None else {**config, "is_causal": causal}


def _is_causal(spec: DrafterSpec) -> bool | None:
    flags = tuple(spec.causal)
    if flags == tuple(kind == "sliding" for kind in spec.layers):
        return None
    if len(set(flags)) == 1:
        return flags[0]
    raise ExportError(
        f"format zlab: layers {list(spec.layers)} with causal {list(flags)} cannot be said; "
        "it knows full bidirectional with sliding causal, all causal, or all bidirectional"
    )


def spec_from_zlab(where: str, config: Mapping[str, Any]) -> DrafterSpec:
    """The spec that a z-lab configuration describes, published ones included.

    ``block_size`` and the ``dflash_config`` keys may stand inside or at the top level (published folders differ);
    where both are given they must agree. Taps are never guessed.

    Raises:
        ExportError: one line naming key, value and what is allowed.
    """
    if config.get("architectures") not in ([ARCHITECTURE], None):
        raise ExportError(
            f"{where}: architectures is {config['architectures']!r}; a DFlash drafter has [{ARCHITECTURE!r}]"
        )
    inner = mapping(where, config, "dflash_config")
    if unknown := sorted(set(inner) - KNOWN):
        raise ExportError(
            f"{where}: dflash_config has {', '.join(unknown)}; such a drafter computes something else than a DFlash one"
        )
    scale = agreed(where, SCALE, config.get(SCALE), inner.get(SCALE))
    number(where, {SCALE: scale}, SCALE, 1.0, low=1e-6, high=1e6)
    needed = KNOWN - {"causal", SCALE}
    both = {key: agreed(where, key, config.get(key), inner.get(key)) for key in needed}
    for key, value in both.items():
        if value is None:
            raise ExportError(f"{where}: {key} is neither at the top level nor in dflash_config; it is never guessed")
    fields = shape_fields(where, config)
    causal = agreed(where, "is_causal", config.get("is_causal"), inner.get("causal"))
    flag(where, {"is_causal": causal}, "is_causal", False)
    fields |= {
        "causal": tuple(kind == "sliding" if causal is None else causal for kind in fields["layers"]),
        "block_size": integer(where, both, "block_size", at_least=2),
        "mask_token_id": integer(where, both, "mask_token_id", at_least=0),
        "taps": layer_ids(where, both, "target_layer_ids"),
        "num_target_layers": integer(where, config, "num_target_layers"),
        "sample_from_anchor": False,
    }
    return build_spec(where, fields)


def write_zlab(
    folder: str | Path,
    spec: DrafterSpec,
    state: Mapping[str, Tensor],
    facts: TargetFacts | None = None,
    dtype: str = "bfloat16",
    *,
    shard_bytes: int = SHARD_BYTES,
    embedding_scale: float | None = 1.0,
    extras: Callable[[Path, Mapping[str, Tensor]], None] | None = None,
) -> dict[str, Tensor]:
    """Write a z-lab folder; it appears whole or not at all.

    Args:
        folder: where to; an older drafter folder there is replaced.
        spec: the architecture.
        state: the drafter's tensors by name, any float type.
        facts: the target, to refuse a drafter that does not fit it.
        dtype: ``bfloat16`` or ``float32``.
        shard_bytes: tensors that take more are spread over several files.
        embedding_scale: see `zlab_config`.
        extras: called with the unfinished folder and the tensors as stored, to add files (model card, golden tensors).

    Returns:
        The tensors as stored.

    Raises:
        ExportError: a drafter that does not fit the format, its spec or its target.
    """
    check_mask("drafter", spec)
    if facts is not None:
        check_target("drafter", spec, facts)
    config = zlab_config(spec, dtype, embedding_scale)
    stored = in_dtype(state, spec, dtype)
    with appearing(folder) as aside:
        write_config(aside, config)
        write_weights(aside, stored, shard_bytes)
        if extras is not None:
            extras(aside, stored)
    return stored


def read_zlab(folder: str | Path) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """Read a z-lab folder: ours, or a published one.

    Raises:
        ExportError: a configuration that is no DFlash drafter's, or tensors that are missing, left over or misshaped.
    """
    where, config = read_config(folder)
    spec = spec_from_zlab(where, config)
    state = read_weights(Path(folder))
    check_shapes(str(folder), spec, {name: tuple(tensor.shape) for name, tensor in state.items()})
    return spec, state
