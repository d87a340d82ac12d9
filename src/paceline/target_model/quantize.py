"""Quantised weights, through transformers' own quantizers, and never other ones than were asked for.

transformers widens weights that the hardware cannot run and says so in a log; here that is a refusal with the way out.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from paceline.errors import TargetError
from paceline.text import first_line

BITS = {"8bit": {"load_in_8bit": True}, "4bit": {"load_in_4bit": True}}


def stored_quantization(config: Any) -> dict[str, Any] | None:
    """What a configuration says of quantized weights, as plain values; None where weights are plain."""
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, dict) else found.to_dict()
    return None


def quantised(config: Any, quantization: str) -> bool:
    """Whether the loaded weights will be quantized."""
    return quantization in BITS or (quantization == "stored" and stored_quantization(config) is not None)


def quantization_options(path: str, config: Any, quantization: str, dtype: torch.dtype) -> dict[str, Any]:
    """What transformers gets about quantization; `config` is changed where stored weights are to be widened.

    Args:
        path: of the target, for errors.
        config: its transformers configuration.
        quantization: see `TargetConfig`.
        dtype: compute type of weights that are quantized on loading.

    Raises:
        TargetError: it cannot be had as asked: package missing, weights quantized already, hardware too old; one line.
    """
    stored = stored_quantization(config)
    shown = f"target.quantization = {quantization}"
    if quantization in BITS:
        if path.endswith(".gguf") or stored is not None:
            how = "as GGUF" if stored is None else f"by {stored.get('quant_method')}"
            raise TargetError(f"{shown}: the weights of {path} are quantized {how} already; use stored or none")
        if importlib.util.find_spec("bitsandbytes") is None:
            raise TargetError(f"{shown}: needs the package bitsandbytes; pip install 'paceline[quantize]'")
        from transformers import BitsAndBytesConfig

        return {"quantization_config": BitsAndBytesConfig(**BITS[quantization], bnb_4bit_compute_dtype=dtype)}
    if stored is None:
        return {}
    from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig

    try:
        wanted = AutoQuantizationConfig.from_dict(stored)
        if quantization == "none":
            if hasattr(wanted, "dequantize"):
                _write(config, {**stored, "dequantize": True})
            return {}
        asked = bool(getattr(wanted, "dequantize", False))
        AutoHfQuantizer.from_config(wanted, pre_quantized=True).validate_environment(device_map={"": "cpu"})
    except (ImportError, ValueError, RuntimeError, TypeError, KeyError) as error:
        raise TargetError(
            f"{shown}: the {stored.get('quant_method')} weights of {path} cannot be used here ({first_line(error)}); "
            "set target.quantization to none to widen them to target.dtype, or install what is missing"
        ) from error
    if getattr(wanted, "dequantize", False) and not asked:
        raise TargetError(
            f"{shown}: the {stored.get('quant_method')} weights of {path} do not run on this machine's hardware; "
            "set target.quantization to none to widen them to target.dtype"
        )
    return {}


def widen(path: str, model: Any, dtype: torch.dtype) -> Any:
    """The model with plain weights of a type, whatever its quantizer left; see ``target.quantization: none``.

    Raises:
        TargetError: its quantizer cannot widen weights; one line.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not getattr(quantizer.quantization_config, "dequantize", False):
        try:
            model = model.dequantize(dtype)
        except (NotImplementedError, ValueError, RuntimeError, AttributeError, TypeError) as error:
            method = quantizer.quantization_config.quant_method
            raise TargetError(
                f"target.quantization = none: the {getattr(method, 'value', method)} weights of {path} cannot be "
                f"widened ({first_line(error)}); use stored"
            ) from error
    if quantizer is None:
        return model
    try:
        return model.to(dtype)
    except RuntimeError as error:
        raise TargetError(
            f"target.quantization = none: {first_line(error)}; leave disk out of target.device_map"
        ) from error


def _write(config: Any, quantization: dict[str, Any]) -> None:
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            part.quantization_config = quantization
