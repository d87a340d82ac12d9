"""The Qwen3 part of a drafter's configuration: what the z-lab and the speculators format have in common.

A draft layer is a Qwen3 layer, and both formats describe it with the keys of a Qwen3 ``config.json``. Reading is
strict: what this drafter cannot express (biases, scaled rotary tables, other activations or layer types) is refused,
never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from paceline.errors import ExportError
from paceline.text import parsed_json

if TYPE_CHECKING:
    from paceline.drafter.spec import DrafterSpec

LAYER_TYPES = {"full": "full_attention", "sliding": "sliding_attention"}
"""Layer kind → its name in ``layer_types``."""
KINDS = {name: kind for kind, name in LAYER_TYPES.items()}
DEFAULT_ROPE_THETA = 10_000.0
"""What a configuration without any rotary base means to transformers."""
CONFIG_FILE = "config.json"
LARGEST = 2**31 - 1
"""No whole number of a configuration is larger."""


def qwen3_section(spec: DrafterSpec, dtype: str) -> dict[str, Any]:
    """The Qwen3 keys of a drafter, every number written out.

    The rotary base is given in both spellings, and no partial width: the drafter rotates whole heads whatever its
    target does. ``max_window_layers`` equals the number of layers, the value that every reader takes together with
    ``layer_types``.
    """
    sliding = "sliding" in spec.layers
    return {
        "model_type": "qwen3",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "vocab_size": spec.vocab_size,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "layer_types": [LAYER_TYPES[kind] for kind in spec.layers],
        "sliding_window": spec.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "max_window_layers": spec.num_layers,
        "max_position_embeddings": spec.max_position_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": spec.initializer_range,
        "tie_word_embeddings": False,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": _eos(spec.eos_token_ids),
        "pad_token_id": spec.pad_token_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _eos(ids: tuple[int, ...]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else ids[0] if ids else None


def read_config(folder: str | Path) -> tuple[str, dict[str, Any]]:
    """The folder's ``config.json``: its path for messages, and its content.

    Raises:
        ExportError: no such file, or no JSON object in it.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise ExportError(f"{folder}: no {CONFIG_FILE}; give a drafter folder")
    try:
        config = parsed_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{path}: is no JSON ({error})") from error
    if not isinstance(config, dict):
        raise ExportError(f"{path}: holds no JSON object")
    return str(path), config


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write ``config.json``, keys in the given order."""
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def integer(where: str, config: Mapping[str, Any], key: str, *, at_least: int = 1) -> int:
    """A whole number that must be there.

    Raises:
        ExportError: absent, no whole number, too small or beyond 31 bits.
    """
    value = config.get(key)
    if not _whole(value, at_least):
        raise ExportError(f"{where}: {key} is {_shown(config, key)}; a whole number from {at_least} on is needed")
    return value


def _whole(value: Any, at_least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= LARGEST


def number(where: str, config: Mapping[str, Any], key: str, default: float, *, low: float, high: float) -> float:
    """A number, or the default where the key is absent or null.

    Raises:
        ExportError: no number, or not between the bounds, which are allowed.
    """
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ExportError(f"{where}: {key} is {value!r}; a number from {low:g} to {high:g} is needed")
    return float(value)


def flag(where: str, config: Mapping[str, Any], key: str, default: bool) -> bool:
    """true or false, or the default where the key is absent or null.

    Raises:
        ExportError: something else.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ExportError(f"{where}: {key} is {value!r}; true or false is needed")
    return default if value is None else value


def mapping(where: str, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; empty where the key is absent or null.

    Raises:
        ExportError: something else.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ExportError(f"{where}: {key} is {value!r}; an object is needed")
    return value or {}


def token_ids(where: str, config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Token ids of a role: one, a list, or none where the key is absent or null.

    Raises:
        ExportError: something else.
    """
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_whole(token, 0) for token in ids):
        raise ExportError(f"{where}: {key} is {value!r}; a token id, a list of such or null is needed")
    return tuple(ids)


def _one_id(where: str, config: Mapping[str, Any], key: str) -> int | None:
    ids = token_ids(where, config, key)
    if len(ids) > 1 or isinstance(config.get(key), list):
        raise ExportError(f"{where}: {key} is {config[key]!r}; one token id or null is needed")
    return ids[0] if ids else None


def layer_ids(where: str, config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A list of layer ids that must be there; whether the target has such layers is the spec's to say.

    Raises:
        ExportError: absent, or no list of whole numbers.
    """
    value = config.get(key)
    if not isinstance(value, list) or not all(
        isinstance(entry, int) and not isinstance(entry, bool) for entry in value
    ):
        raise ExportError(
            f"{where}: {key} is {_shown(config, key)}; a list of layer ids is needed, they are never guessed"
        )
    return tuple(value)


def _shown(config: Mapping[str, Any], key: str) -> str:
    return repr(config[key]) if key in config else "absent"


def agreed(where: str, key: str, *values: Any) -> Any:
    """The one value of a key that may be in several places; None when it is in none.

    Raises:
        ExportError: two places disagree. Engines differ in which one they read, so neither is chosen.
    """
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise ExportError(f"{where}: {key} is given as {' and as '.join(map(repr, given))}; make them equal")
    return given[0] if given else None


def shape_fields(where: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The spec's fields that the Qwen3 keys say; what is not a plain Qwen3 layer is refused.

    Raises:
        ExportError: a missing or impossible value, or a feature that this drafter does not have.
    """
    _plain(where, config)
    num_layers = integer(where, config, "num_hidden_layers")
    heads, hidden = integer(where, config, "num_attention_heads"), integer(where, config, "hidden_size")
    groups = integer(where, config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    if heads % groups:
        raise ExportError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {groups}")
    kinds, window = _layers(where, config, num_layers)
    return {
        "num_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": integer(where, config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": integer(where, config, "head_dim") if config.get("head_dim") is not None else hidden // heads,
        "rms_norm_eps": number(where, config, "rms_norm_eps", 1e-6, low=1e-12, high=0.1),
        "vocab_size": integer(where, config, "vocab_size"),
        "rope_theta": _rope_theta(where, config),
        "layers": kinds,
        "sliding_window": window,
        "max_position_embeddings": integer(where, config, "max_position_embeddings"),
        "initializer_range": number(where, config, "initializer_range", 0.02, low=0.0, high=10.0),
        "bos_token_id": _one_id(where, config, "bos_token_id"),
        "eos_token_ids": token_ids(where, config, "eos_token_id"),
        "pad_token_id": _one_id(where, config, "pad_token_id"),
    }


def _plain(where: str, config: Mapping[str, Any]) -> None:
    neutral: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "attention_sink_bias": (None, False),
        "partial_rotary_factor": (None, 1, 1.0),
        "output_multiplier": (None, 1, 1.0),
        "final_logit_softcapping": (None, 0, 0.0),
    }
    for key, allowed in neutral.items():
        if not any(type(config.get(key)) is type(value) and config.get(key) == value for value in allowed):
            raise ExportError(f"{where}: {key} is {config[key]!r}; a drafter here only ever has {allowed[-1]!r}")


def _layers(where: str, config: Mapping[str, Any], num_layers: int) -> tuple[tuple[str, ...], int | None]:
    window = config.get("sliding_window")
    types = config.get("layer_types")
    if types is None:
        if config.get("use_sliding_window") and window is not None:
            raise ExportError(
                f"{where}: use_sliding_window without layer_types; engines read that differently, list layer_types"
            )
        types = [LAYER_TYPES["full"]] * num_layers
    if not isinstance(types, list) or len(types) != num_layers:
        raise ExportError(f"{where}: layer_types must list one type for each of the {num_layers} layers, is {types!r}")
    if unknown := sorted({str(name) for name in types if not isinstance(name, str) or name not in KINDS}):
        raise ExportError(f"{where}: unknown layer type {', '.join(unknown)}; allowed are {', '.join(KINDS)}")
    kinds = tuple(KINDS[name] for name in types)
    if "sliding" not in kinds:
        return kinds, None
    if not flag(where, config, "use_sliding_window", True):
        raise ExportError(
            f"{where}: layer_types has sliding layers but use_sliding_window is false, so the window would be dropped"
        )
    return kinds, integer(where, config, "sliding_window")


def _rope_theta(where: str, config: Mapping[str, Any]) -> float:
    parameters = mapping(where, config, "rope_parameters")
    for source, value in (("rope_parameters", parameters), ("rope_scaling", mapping(where, config, "rope_scaling"))):
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default":
            raise ExportError(f"{where}: {source} asks for {kind} rotary tables; only plain ones are supported")
        if value.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ExportError(
                f"{where}: {source} has partial_rotary_factor {value['partial_rotary_factor']}; "
                "a drafter rotates whole heads"
            )
    theta = agreed(where, "rope_theta", config.get("rope_theta"), parameters.get("rope_theta"))
    return number(where, {"rope_theta": theta}, "rope_theta", DEFAULT_ROPE_THETA, low=1.0, high=1e15)
