"""What of a target's settings cannot be had here, found before any weights are read."""

from __future__ import annotations

import importlib.util

from paceline.config.schema import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.device_map import placement_options
from paceline.target_model.facts import read_config
from paceline.target_model.load import torch_dtype
from paceline.target_model.quantize import BITS, quantised, quantization_options


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
