"""Loading a target: any causal language model that transformers can load, frozen, with taps."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.config import TargetConfig, devices_of
from paceline.errors import TargetError
from paceline.target_model.adapter import merge_adapter
from paceline.target_model.device_map import home_of, placement_options
from paceline.target_model.facts import describe_target, model_class, read_config
from paceline.target_model.files import read_header, resolve_folder, weight_files
from paceline.target_model.introspect import Structure, find_structure
from paceline.target_model.model import TargetModel
from paceline.target_model.quantize import quantised, quantization_options, stored_quantization, widen
from paceline.target_model.row_check import needs_mask, prove_packed
from paceline.target_model.taps import check_taps
from paceline.text import first_line
from paceline.types import TargetFacts

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


PLAIN = ("F64", "F32", "F16", "BF16")
"""Types of plain weights, as safetensors names them."""


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """A torch type by its name in the settings."""
    return name if isinstance(name, torch.dtype) else DTYPES[name]


def load_target(
    settings: TargetConfig,
    taps: Sequence[int],
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> TargetModel:
    """Loads the target and finds its parts.

    Args:
        settings: the target's settings.
        taps: layer ids to tap, in feature order.
        device: where its embedding is and its features come out, unless ``device_map`` says otherwise; several,
            joined by ``+``, for a target that is spread over them.
        dtype: type of weights and features; the settings' type where None.

    Raises:
        TargetError: one line: no model, unreadable or incomplete weights, impossible taps, no decoder layers found.
    """
    check_taps(taps, describe_target(settings).num_layers)
    model, structure, facts = load_model(settings, device, dtype)
    target = TargetModel(model, structure, facts, taps, packed=settings.rows == "packed")
    if target.packed:
        prove_packed(target)
    else:
        target.masked = needs_mask(target)
    return target


def load_model(
    settings: TargetConfig,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    *,
    config: Any = None,
) -> tuple[Any, Structure, TargetFacts]:
    """A frozen model in evaluation mode, its adapter merged, its parts, its facts.

    Args:
        settings: the target's settings.
        device: where it is, unless ``device_map`` says otherwise; several, joined by ``+``, to spread it over them.
        dtype: type of its plain weights; the settings' type where None.
        config: of fewer layers than the folder's, whose other tensors are left out; the folder's own where None.

    Raises:
        TargetError: one line.
    """
    first, *others = devices_of(str(device))
    if others:
        settings, device = settings.model_copy(update={"device_map": [first, *others]}), first
    facts = describe_target(settings)
    if config is None:
        config = read_config(settings.path, settings.trust_remote_code)
    else:
        facts = replace(facts, num_layers=config.get_text_config(decoder=True).num_hidden_layers)
    wanted = torch_dtype(dtype or settings.dtype)
    model = _load(settings, config, wanted, device)
    if settings.quantization == "none":
        model = widen(settings.path, model, wanted)
    if settings.adapter is not None:
        model = merge_adapter(model, settings.adapter)
    model.requires_grad_(False).eval()
    if getattr(model, "hf_device_map", None) is None:
        model.to(device)
    home_of(model.get_input_embeddings(), settings.path)
    return model, find_structure(model, facts.num_layers), facts


def _load(settings: TargetConfig, config: Any, dtype: torch.dtype, device: str | torch.device) -> Any:
    """The model of a configuration with the folder's weights, complete, placed where it is spread or quantized."""
    path = settings.path
    options: dict[str, Any] = {
        **quantization_options(path, config, settings.quantization, dtype),
        **placement_options(settings.device_map, device, quantised=quantised(config, settings.quantization)),
        "config": config,
        "dtype": dtype,
        "trust_remote_code": settings.trust_remote_code,
        "local_files_only": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are refused below, by name
    }
    if dtype == torch.float64 and _has_experts_choice():
        options["experts_implementation"] = "eager"  # grouped kernels know no float64
    if settings.attention != "auto":
        options["attn_implementation"] = settings.attention
    if path.endswith(".gguf"):
        options["gguf_file"] = Path(path).name
    try:
        with _quiet():
            model, info = model_class(config).from_pretrained(str(resolve_folder(path)), **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # damaged files, and code that comes with the target, may raise anything
        raise TargetError(f"target.path = {path}: its weights cannot be loaded ({first_line(error)})") from error
    _check_complete(path, info)
    if stored_quantization(config) is None and not path.endswith(".gguf"):
        _check_plain(path)
    return model


def _check_plain(path: str) -> None:
    """Refuse quantized weights whose configuration does not say so: transformers would take their codes for weights."""
    for file in weight_files(resolve_folder(path)):
        for name, entry in read_header(file).items():
            if name.endswith(".weight") and entry["dtype"] not in PLAIN:
                raise TargetError(
                    f"target.path = {path}: {name} is stored as {entry['dtype']}, but config.json has no "
                    "quantization_config that says how to read it; fetch config.json again"
                )


def _has_experts_choice() -> bool:
    from transformers import PreTrainedModel

    return hasattr(PreTrainedModel, "set_experts_implementation")


def _check_complete(path: str, info: Any) -> None:
    """transformers fills what a folder lacks with random numbers; here that is refused."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise TargetError(
            f"target.path = {path}: {len(missing)} tensors are missing from its files, the first is {missing[0]}; "
            "fetch the folder again"
        )
    misshaped = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    if misshaped:
        raise TargetError(
            f"target.path = {path}: {len(misshaped)} tensors do not fit config.json in shape, the first is "
            f"{misshaped[0]}; configuration and weights belong to different models"
        )


@contextmanager
def _quiet() -> Generator[None]:
    """transformers' progress bars and load report are silent meanwhile; what they would say is checked by us."""
    from transformers.utils import logging as noise

    level, bars = noise.get_verbosity(), noise.is_progress_bar_enabled()
    noise.set_verbosity(logging.CRITICAL)
    noise.disable_progress_bar()
    try:
        yield
    finally:
        noise.set_verbosity(level)
        if bars:
            noise.enable_progress_bar()
