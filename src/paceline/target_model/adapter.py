"""LoRA adapters: merged into the target's weights on loading, so that taps, head and cache are the tuned model's."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

from paceline.errors import TargetError
from paceline.target_model.files import hash_files
from paceline.text import absent, first_line, parsed_json

CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")


def adapter_files(adapter: str) -> tuple[Path, Path]:
    """Configuration and weights of an adapter's folder.

    Raises:
        TargetError: no such folder, or no adapter in it; one line.
    """
    folder = Path(adapter).expanduser()
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if not folder.is_dir() or not (folder / CONFIG).is_file() or weights is None:
        what = absent(folder, "folder") if not folder.is_dir() else f"holds no {CONFIG} with {WEIGHTS[0]}"
        raise TargetError(f"target.adapter = {adapter}: {what}; give the folder that PEFT saved a LoRA adapter to")
    return folder / CONFIG, weights


def identify_adapter(adapter: str) -> str:
    """Hash of an adapter's configuration and weights, hexadecimal digits."""
    config, weights = adapter_files(adapter)
    return hash_files([config, weights])


def merge_adapter(model: Any, adapter: str) -> Any:
    """The model with an adapter's changes in its weights.

    Args:
        model: a loaded target with plain weights.
        adapter: folder of the adapter.

    Raises:
        TargetError: PEFT is not installed; not an adapter that merges into weights; made for another model; one line.
    """
    config, _ = adapter_files(adapter)
    if importlib.util.find_spec("peft") is None:
        raise TargetError(f"target.adapter = {adapter}: needs the package peft; pip install 'paceline[peft]'")
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights
    from safetensors import SafetensorError

    shown = f"target.adapter = {adapter}"
    head = model.get_output_embeddings()
    shared = head.weight if head is not None and head.weight is model.get_input_embeddings().weight else None
    try:
        settings = PeftConfig.from_pretrained(str(config.parent))
        kind = getattr(settings.peft_type, "value", settings.peft_type)
        if settings.is_prompt_learning:
            raise TargetError(f"{shown}: a {kind} adapter adds virtual tokens and cannot be merged into the weights")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing tensors, which are found below, and between the libraries
            tuned = PeftModel.from_pretrained(model, str(config.parent), config=settings)
            has = get_peft_model_state_dict(tuned)
            stored = load_peft_weights(str(config.parent), device="cpu")
    except (ValueError, RuntimeError, KeyError, TypeError, OSError, AttributeError, SafetensorError) as error:
        raise TargetError(f"{shown}: does not fit the target ({_misfit(error)}); {_base(config)}") from error
    if strange := sorted(stored.keys() ^ has.keys()):
        side = "the target lacks" if strange[0] in stored else "the adapter lacks"
        raise TargetError(
            f"{shown}: does not fit the target: {len(strange)} tensors belong to one of them alone, the first is "
            f"{strange[0]}, which {side}; {_base(config)}"
        )
    if shared is not None and (end := _changes(tuned, shared)):
        raise TargetError(
            f"{shown}: changes {end}, whose weight is embedding and head at once; merged, both would change, which "
            "they do not while PEFT runs it; train it without that module, or with modules_to_save"
        )
    if not hasattr(tuned.base_model, "merge_and_unload"):
        raise TargetError(f"{shown}: a {kind} adapter cannot be merged into the weights")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a copied end is no longer tied: it is read as it is
            return tuned.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise TargetError(f"{shown}: cannot be merged ({_misfit(error)}); fetch the adapter again") from error


def _changes(tuned: Any, weight: Any) -> str | None:
    """Name of a module with this weight that an adapter adds something to; whole copies and single rows apart."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in tuned.named_modules():
        adds = isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer)
        if adds and getattr(module.get_base_layer(), "weight", None) is weight:
            return name.removeprefix("base_model.model.")
    return None


def _base(config: Path) -> str:
    """Which model an adapter was made for, as far as it says so."""
    try:
        base = parsed_json(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        return f"{config} is damaged, fetch it again"
    return f"it was made for {base}" if base else "give an adapter of this very model"


def _misfit(error: BaseException) -> str:
    """One line of an exception: of a list of tensors of another shape, the first."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line.startswith("size mismatch")), first_line(error))
