"""Settings of the target."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from paceline.config.section import Section

DataType = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["stored", "none", "8bit", "4bit"]


class TargetConfig(Section):
    """The frozen language model that the drafter will speed up."""

    path: str
    """Folder of a Hugging Face causal language model, a .gguf file, or a hub name."""
    dtype: DataType = "bfloat16"
    """Type of the target's weights and of the features that it hands over."""
    adapter: str | None = None
    """Folder of a LoRA adapter (PEFT) that is merged into the weights on loading."""
    quantization: Quantization = "stored"
    """stored: weights as the folder has them. none: quantized weights are widened to `dtype`. 8bit, 4bit: bitsandbytes
    quantizes plain weights on loading."""
    taps: list[int] | None = None
    """Tapped layers: id i is the output of 0-based decoder layer i. Unset: spread over the depth by the usual rule."""
    num_taps: int = Field(default=5, ge=1)
    """How many layers to tap when `taps` is unset."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Attention implementation that transformers is asked for."""
    rows: Literal["padded", "packed"] = "padded"
    """padded: one document a row of the target's forward. packed: all documents of a micro-batch in one row, where a
    test at the start proves that they do not see one another; goes with `plan.strategy: packed`."""
    device_map: Literal["auto"] | list[str] | dict[str, str] | None = None
    """Spreads one target worker over several devices: auto, a list of devices, or a device for each module name.
    Unset: all of it on the worker's entry of `flow.target_devices`."""
    trust_remote_code: bool = False
    """Whether code that comes with the target may run."""

    @field_validator("device_map", mode="before")
    @classmethod
    def _one_of_three_forms(cls, value: Any) -> Any:
        names = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else []
        if value in (None, "auto") or (names and all(isinstance(name, str) for name in names)):
            return value
        raise ValueError("must be auto, a list of devices like [cuda:0, cuda:1], or a device for each module name")
