"""What must be known of a target before its weights are loaded. No torch is imported here by paceline itself."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.config.schema import TargetConfig
from paceline.errors import TargetError
from paceline.stop_tokens import stop_token_ids
from paceline.target_model.adapter import identify_adapter
from paceline.target_model.files import TOKENIZER_FILES, fingerprint, identify, resolve_folder
from paceline.target_model.gguf import gguf_config, identify_gguf
from paceline.text import first_line, parsed_json
from paceline.types import TargetFacts

GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How classes end that predict next tokens."""
NORM_KEYS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


def describe_target(settings: TargetConfig) -> TargetFacts:
    """Facts of the target of some settings, its adapter and the quantization asked for included in its identity."""
    return describe(
        settings.path, settings.trust_remote_code, adapter=settings.adapter, quantization=settings.quantization
    )


def describe(
    path: str, trust_remote_code: bool = False, *, adapter: str | None = None, quantization: str = "stored"
) -> TargetFacts:
    """Facts of a target, read from its folder.

    Args:
        path: folder, ``.gguf`` file or hub name.
        trust_remote_code: whether configuration code that comes with the target may run.
        adapter: folder of an adapter that will be merged.
        quantization: see `TargetConfig`.

    Raises:
        TargetError: one line: no such folder, no or broken config.json, not a causal language model, sizes missing.
    """
    folder = resolve_folder(path)
    config = read_config(path, trust_remote_code)
    text = config.get_text_config(decoder=True)
    raw = {} if path.endswith(".gguf") else _raw_config(folder)
    num_layers, hidden, vocab = (_whole(text, name) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    if num_layers is None or hidden is None or vocab is None:
        sizes = {"layers": num_layers, "hidden size": hidden, "vocabulary": vocab}
        missing = ", ".join(name for name, value in sizes.items() if value is None)
        raise TargetError(
            f"target.path = {path}: its configuration ({text.model_type}) does not say its {missing}; "
            "such an architecture cannot be a target"
        )
    heads = _whole(text, "num_attention_heads")
    identity = _identity(path, folder, raw, adapter, quantization)
    return TargetFacts(
        path=path,
        architecture=(config.architectures or causal_classes(config.model_type) or [type(config).__name__])[0],
        model_type=text.model_type,
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=vocab,
        intermediate_size=_whole(text, "intermediate_size", "ffn_hidden_size", "ffn_dim"),
        num_attention_heads=heads,
        num_key_value_heads=_whole(text, "num_key_value_heads") or heads,
        head_dim=_whole(text, "head_dim") or (hidden // heads if heads else None),
        rms_norm_eps=_real(text, *NORM_KEYS),
        rope_theta=_rope_theta(text),
        max_position_embeddings=_whole(text, "max_position_embeddings"),
        initializer_range=_real(text, "initializer_range"),
        tied_head=_tied(config, text),
        bos_token_id=_token(config, text, "bos_token_id"),
        eos_token_ids=stop_token_ids(str(folder), _tokenizer_eos(path, folder, text, trust_remote_code), vocab),
        pad_token_id=_token(config, text, "pad_token_id"),
        fingerprint=fingerprint(identity),
        identity=identity,
    )


def num_positions(settings: TargetConfig) -> int | None:
    """Tokens of the longest context of a target; None where its folder does not say, or holds a tokenizer alone.

    Raises:
        TargetError: no such folder, or a broken config.json; one line.
    """
    folder = resolve_folder(settings.path, weights=False)
    if not settings.path.endswith(".gguf") and not (folder / "config.json").is_file():
        return None
    text = read_config(settings.path, settings.trust_remote_code).get_text_config(decoder=True)
    return _whole(text, "max_position_embeddings")


def identify_target(settings: TargetConfig) -> dict[str, str]:
    """What makes a target the one it is, part by part (`folder.identify`, and its adapter); weights are not fetched.

    Raises:
        TargetError: no such folder, or a broken config.json; one line.
    """
    folder = resolve_folder(settings.path, weights=False)
    raw = {} if settings.path.endswith(".gguf") else _raw_config(folder)
    return _identity(settings.path, folder, raw, settings.adapter, settings.quantization)


def _identity(path: str, folder: Path, raw: dict[str, Any], adapter: str | None, quantization: str) -> dict[str, str]:
    if path.endswith(".gguf"):
        parts = identify_gguf(folder / Path(path).name)
    else:
        parts = identify(folder, raw)
    if quantization != "stored":
        parts["quantization"] = quantization
    if adapter is not None:
        parts["adapter"] = identify_adapter(adapter)
    return parts


def read_config(path: str, trust_remote_code: bool = False) -> Any:
    """The target's transformers configuration, refused in one line when it is no causal language model's."""
    folder = resolve_folder(path)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    if path.endswith(".gguf"):
        config = gguf_config(folder / Path(path).name)
        _check_causal(path, config, {})
        return config
    if not (folder / "config.json").is_file():
        files = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"or its {files[0]}" if files else "or a .gguf file"
        raise TargetError(
            f"target.path = {path}: holds no config.json; give the folder of a Hugging Face causal LM, {hint}"
        )
    raw = _raw_config(folder)
    if raw.get("auto_map") and not trust_remote_code and not _known_type(raw.get("model_type")):
        raise TargetError(
            f"target.path = {path}: model_type {raw.get('model_type')!r} comes with its own code; read that code, "
            "then set target.trust_remote_code to true"
        )
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), **options)
    except Exception as error:  # code that comes with the target may raise anything
        raise TargetError(f"target.path = {path}: config.json cannot be used ({first_line(error)})") from error
    _check_causal(path, config, raw)
    return config


def causal_classes(model_type: str) -> list[str]:
    """Names of the transformers classes that are causal language models (or wrap one) for a model type."""
    from transformers.models.auto import modeling_auto as auto

    tables = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    return [table[model_type] for table in tables if model_type in table]


def model_class(config: Any) -> Any:
    """The auto class that builds this configuration's language model, wrapper included where it is one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
    from transformers.models.auto import modeling_auto as auto

    named = (config.architectures or [None])[0]
    tables = (
        (AutoModelForCausalLM, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (AutoModelForImageTextToText, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        (AutoModelForMultimodalLM, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES),
    )
    exact = [kind for kind, table in tables if named is not None and table.get(config.model_type) == named]
    possible = [kind for kind, table in tables if config.model_type in table]
    return (exact or possible or [AutoModelForCausalLM])[0]


def _known_type(model_type: str | None) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _check_causal(path: str, config: Any, raw: dict[str, Any]) -> None:
    if "AutoModelForCausalLM" in raw.get("auto_map", {}):
        return
    known = causal_classes(config.model_type)
    named = (config.architectures or known)[:1]
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "is an encoder-decoder"
    elif not known:
        reason = "is not a causal language model in the installed transformers"
    elif hasattr(config.get_text_config(decoder=True), "is_decoder") and "is_decoder" in raw and not raw["is_decoder"]:
        reason = "is an encoder (is_decoder false)"
    elif (
        named
        and named[0] not in known
        and not named[0].endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    ):
        reason = f"was saved as {named[0]}, which predicts no next token"
    if reason:
        raise TargetError(f"target.path = {path}: model_type {config.model_type!r} {reason}; give a causal LM")


def _raw_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        raw = parsed_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TargetError(f"{file}: not readable as JSON ({first_line(error)}); fetch the file again") from error
    if not isinstance(raw, dict):
        raise TargetError(f"{file}: holds a {type(raw).__name__} instead of an object; fetch the file again")
    return raw


def _whole(config: Any, *names: str) -> int | None:
    """The first whole number among attributes; lists (one entry a layer) give their largest.

    transformers' `attribute_map` answers to the usual names where a family has its own names.
    """
    for name in names:
        value = _attribute(config, name)
        if isinstance(value, (list, tuple)) and value and all(isinstance(entry, int) for entry in value):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _real(config: Any, *names: str) -> float | None:
    for name in names:
        value = _attribute(config, name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None


def _attribute(config: Any, name: str) -> Any:
    """An attribute of a configuration; None where it is missing or differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except (AttributeError, ValueError, RuntimeError):
        return None


def _rope_theta(text: Any) -> float | None:
    parameters = getattr(text, "rope_parameters", None)
    if isinstance(parameters, dict):
        if "rope_theta" in parameters:
            return float(parameters["rope_theta"])
        for kind in ("full_attention", *parameters):  # one entry a layer kind
            entry = parameters.get(kind)
            if isinstance(entry, dict) and "rope_theta" in entry:
                return float(entry["rope_theta"])
    return _real(text, "rope_theta", "rotary_emb_base")


def _tied(config: Any, text: Any) -> bool:
    """Whether the head shares the embedding's weights; a wrapper's own word counts before its text part's."""
    own = getattr(config, "tie_word_embeddings", None)
    return bool(getattr(text, "tie_word_embeddings", False) if own is None else own)


def _token(config: Any, text: Any, name: str) -> int | None:
    for place in (text, config):
        value = getattr(place, name, None)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, int) and value >= 0:
            return value
    return None


def _tokenizer_eos(path: str, folder: Path, text: Any, trust_remote_code: bool) -> int | None:
    """The end token of the target's tokenizer; None where it has none, or the folder has no tokenizer.

    Raises:
        TargetError: the tokenizer cannot be loaded.
    """
    if path.endswith(".gguf"):  # its metadata has one end token, of the tokenizer and of the configuration
        return _token(text, text, "eos_token_id")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return _loaded_tokenizer_eos(str(folder), trust_remote_code)


@lru_cache(maxsize=4)
def _loaded_tokenizer_eos(folder: str, trust_remote_code: bool) -> int | None:
    """Kept, as a large vocabulary takes a second to load."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return tokenizer.eos_token_id
    except Exception as error:  # code that comes with the target may raise anything
        raise TargetError(f"{folder}: its tokenizer cannot be loaded ({first_line(error)})") from error
