"""What of a target's settings cannot be had here, found before any weights are read."""

from __future__ import annotations

import importlib.util
from typing import Any

from paceline.config.schema import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.device_map import placement_options
from paceline.target_model.facts import read_config
from paceline.target_model.load import torch_dtype
from paceline.target_model.quantize import BITS, quantised, quantization_options

LINEAR_KERNELS = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}
"""Packages of the extra `fla` and their modules, which transformers uses for linear attention where they are there."""


def target_errors(settings: TargetConfig, num_workers: int = 1) -> list[str]:
    """Errors that the settings alone show, one line each.

    Args:
        settings: the target.
        num_workers: entries of ``flow.target_devices``.
    """
    errors = []
    if settings.adapter is not None and importlib.util.find_spec("peft") is None:
        errors.append("target.adapter: needs the package peft; pip install 'paceline[peft]'")
    if settings.adapter is not None and settings.quantization in BITS:
        errors.append(
            f"target.adapter: cannot be merged into weights that are quantized to {settings.quantization}; merge it "
            "into the plain model with PEFT, save that, and give its folder as target.path"
        )
    if settings.device_map is not None and num_workers > 1:
        errors.append(
            f"target.device_map: spreads one worker over devices, and flow.target_devices lists {num_workers} workers; "
            "list one"
        )
    return errors


def slow_layers(settings: TargetConfig, device: str, tokens: int) -> str | None:
    """What it costs that kernels for a target's linear attention are missing on a GPU, as one line; None where not.

    transformers then computes these layers in float32 with plain PyTorch (5.24, `torch_chunk_gated_delta_rule`): of
    queries, keys and values three copies each exist, and three matrices of 64 columns a token and head.

    Args:
        settings: the target.
        device: of a worker.
        tokens: padded tokens of the largest micro-batch.
    """
    text = read_config(settings.path, settings.trust_remote_code).get_text_config(decoder=True)
    missing = [name for name, module in LINEAR_KERNELS.items() if importlib.util.find_spec(module) is None]
    count = _linear_layers(text)
    if not (count and missing and device.startswith("cuda")):
        return None
    heads = getattr(text, "linear_num_value_heads", 0)
    widths = getattr(text, "linear_key_head_dim", 0) + getattr(text, "linear_value_head_dim", 0) + 64
    return (
        f"target: {count} of its {text.num_hidden_layers} layers are linear attention, and packages are missing for it "
        f"({', '.join(missing)}): plain PyTorch computes them several times slower, with about "
        f"{4 * 3 * tokens * heads * widths / 2**30:.1f} GiB more memory; pip install 'paceline[fla]'"
    )


def check_repeatable(settings: TargetConfig, device: str) -> None:
    """Refuses a target whose kernels are chosen by timing, where the same bits are asked for.

    Raises:
        TargetError: one line.
    """
    text = read_config(settings.path, settings.trust_remote_code).get_text_config(decoder=True)
    chosen = importlib.util.find_spec(LINEAR_KERNELS["flash-linear-attention"]) is not None
    if _linear_layers(text) and chosen and device.startswith("cuda"):
        raise TargetError(
            "train.deterministic: flash-linear-attention chooses the kernels of the target's linear attention by "
            "timing, so another start may compute other bits; uninstall it, or set train.deterministic to false"
        )


def _linear_layers(text: Any) -> int:
    return sum(kind == "linear_attention" for kind in getattr(text, "layer_types", None) or ())


def check_loadable(settings: TargetConfig, device: str = "cpu") -> None:
    """Refuses what the target's configuration shows to be impossible here: quantizers, hardware, devices.

    Raises:
        TargetError: one line.
    """
    config = read_config(settings.path, settings.trust_remote_code)
    will_be_quantised = quantised(config, settings.quantization)
    if settings.adapter is not None and will_be_quantised:
        raise TargetError(
            f"target.adapter: cannot be merged into the quantized weights of {settings.path}; set target.quantization "
            "to none to widen them first"
        )
    quantization_options(settings.path, config, settings.quantization, torch_dtype(settings.dtype))
    placement_options(settings.device_map, device, quantised=will_be_quantised)
