"""The speculators folder, which vLLM reads: the z-lab tensors under another `config.json`.

Its taps are counted from the embedding (id + 1). ``sliding_window_non_causal`` is read in two ways: the speculators
package takes full layers as bidirectional whatever it says, vLLM makes all layers causal where it is false. So it is
true for every bidirectional drafter, false where all layers are sliding and causal, and a mixture of both is refused.
The label convention is written: with ``sample_from_anchor`` slot k predicts token a + 1 + k. Where the target's first
layer gets something else than the stored embedding, the folder carries what it gets (``embed_tokens.weight``). Without
``speculators_config`` its readers load NaN weights and without ``transformer_layer_config`` they build another model
silently, so both are demanded on reading too.
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
    qwen3_section,
    read_config,
    shape_fields,
    write_config,
)
from paceline.export.engines import check_servable
from paceline.export.folder import appearing
from paceline.export.weights import DTYPES, EMBEDDING, SHARD_BYTES, check_shapes, in_dtype, read_weights, write_weights

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.drafter.spec import DrafterSpec
    from paceline.types import TargetFacts

ARCHITECTURE = "DFlashDraftModel"
MODEL_TYPE_KEY = "speculators_model_type"
"""The key by which such a folder is known."""
FORMAT_VERSION = "0.9.0"
"""Release of the format whose keys are written."""


def speculators_config(spec: DrafterSpec, facts: TargetFacts, dtype: str) -> dict[str, Any]:
    """The folder's ``config.json``.

    Args:
        spec: the drafter.
        facts: the target; its path is where readers fetch embedding, head and final norm from.
        dtype: of the tensors.

    Raises:
        ExportError: a causality that the format cannot say, or a drafter that no engine serves as trained.
    """
    check_servable(spec)
    return {
        "architectures": [ARCHITECTURE],
        MODEL_TYPE_KEY: "dflash",
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": spec.num_drafts,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": facts.path, "architectures": [facts.architecture]},
        },
        "transformer_layer_config": qwen3_section(spec, dtype),
        "draft_vocab_size": spec.vocab_size,
        "block_size": spec.block_size,
        "target_hidden_size": spec.hidden_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in spec.taps],
        "mask_token_id": spec.mask_token_id,
        "sliding_window_non_causal": _non_causal(spec),
        "sample_from_anchor": spec.sample_from_anchor,
        "num_target_layers": spec.num_target_layers,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _non_causal(spec: DrafterSpec) -> bool:
    flags = set(spec.causal)
    if flags == {False}:
        return True
    if flags == {True} and set(spec.layers) == {"sliding"}:
        return False
    raise ExportError(
        f"format speculators: layers {list(spec.layers)} with causal {list(spec.causal)} cannot be said; vLLM reads "
        "one causality for all layers there, and others take full layers as bidirectional; export with --format zlab"
    )


def spec_from_speculators(where: str, config: Mapping[str, Any]) -> DrafterSpec:
    """The spec that a speculators configuration describes.

    Causality is read as the speculators package reads it, which trained the published folders: full layers are
    bidirectional. The depth of the target is not a key of the format; ours carries it, and elsewhere it is read as one
    above the last tap, which only bounds the taps.

    Raises:
        ExportError: one line naming key, value and what is allowed.
    """
    if config.get(MODEL_TYPE_KEY) != "dflash":
        raise ExportError(f"{where}: {MODEL_TYPE_KEY} is {config.get(MODEL_TYPE_KEY)!r}; a DFlash drafter has 'dflash'")
    for key in ("speculators_config", "transformer_layer_config"):
        if not isinstance(config.get(key), dict):
            raise ExportError(f"{where}: {key} is absent; readers would build another model without a word")
    layer = {"vocab_size": config.get("draft_vocab_size"), **config["transformer_layer_config"]}
    fields = shape_fields(f"{where}: transformer_layer_config", layer)
    if integer(where, config, "draft_vocab_size") != fields["vocab_size"]:
        raise ExportError(
            f"{where}: draft_vocab_size {config['draft_vocab_size']} differs from vocab_size {fields['vocab_size']}; "
            "a reduced vocabulary with its own head is not supported"
        )
    hidden = agreed(where, "target_hidden_size", config.get("target_hidden_size"), fields["hidden_size"])
    taps = [tap - 1 for tap in layer_ids(where, config, "aux_hidden_state_layer_ids")]
    depth = config.get("num_target_layers")
    non_causal = flag(where, config, "sliding_window_non_causal", False)
    fields |= {
        "hidden_size": hidden,
        "causal": tuple(kind == "sliding" and not non_causal for kind in fields["layers"]),
        "block_size": integer(where, config, "block_size", at_least=2),
        "mask_token_id": integer(where, config, "mask_token_id", at_least=0),
        "taps": tuple(taps),
        "num_target_layers": max(taps, default=0) + 1 if depth is None else integer(where, config, "num_target_layers"),
        "sample_from_anchor": flag(where, config, "sample_from_anchor", False),
    }
    spec = build_spec(where, fields)
    _check_proposals(where, config["speculators_config"], spec)
    return spec


def _check_proposals(where: str, section: Mapping[str, Any], spec: DrafterSpec) -> None:
    if section.get("algorithm") != "dflash":
        raise ExportError(f"{where}: speculators_config.algorithm is {section.get('algorithm')!r}; 'dflash' is needed")
    methods = section.get("proposal_methods") or []
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        raise ExportError(f"{where}: speculators_config.proposal_methods is {methods!r}; a list of objects is needed")
    counts = [method.get("speculative_tokens") for method in methods]
    if any(isinstance(count, int) and count > spec.num_drafts for count in counts):
        raise ExportError(
            f"{where}: proposes {max(counts)} tokens, but a block of {spec.block_size} drafts {spec.num_drafts} "
            f"(sample_from_anchor {str(spec.sample_from_anchor).lower()})"
        )


def write_speculators(
    folder: str | Path,
    spec: DrafterSpec,
    state: Mapping[str, Tensor],
    facts: TargetFacts,
    dtype: str = "bfloat16",
    *,
    shard_bytes: int = SHARD_BYTES,
    embedding: Tensor | None = None,
    extras: Callable[[Path, Mapping[str, Tensor]], None] | None = None,
) -> dict[str, Tensor]:
    """Write a speculators folder; it appears whole or not at all. Arguments and errors as for `write_zlab`.

    Args:
        embedding: what the target's first layer gets for every token, [V, D]; None where that is the stored embedding.

    Returns:
        The tensors as stored.
    """
    check_mask("drafter", spec)
    check_target("drafter", spec, facts)
    config = speculators_config(spec, facts, dtype)
    stored = in_dtype(state, spec, dtype)
    with appearing(folder) as aside:
        write_config(aside, config)
        carried = {} if embedding is None else {EMBEDDING: embedding.to(DTYPES[dtype]).contiguous()}
        write_weights(aside, {**stored, **carried}, shard_bytes)
        if extras is not None:
            extras(aside, stored)
    return stored


def read_speculators(folder: str | Path) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """Read a speculators folder.

    Published ones may carry copies of the target's embedding and head; those are left aside, they are the target's.

    Raises:
        ExportError: a configuration that is no DFlash drafter's, or tensors that are missing, left over or misshaped.
    """
    where, config = read_config(folder)
    spec = spec_from_speculators(where, config)
    borrowed = {EMBEDDING, "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    state = {name: tensor for name, tensor in read_weights(Path(folder)).items() if name not in borrowed}
    check_shapes(str(folder), spec, {name: tuple(tensor.shape) for name, tensor in state.items()})
    return spec, state
