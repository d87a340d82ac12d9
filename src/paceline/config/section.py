"""The root of all settings models."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A group of settings: unknown keys are refused, values are not coerced across types, instances do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _word_for_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML 1.1 reads off and on as booleans: read back where those are the allowed words."""
        word = ("off", "on")[value] if isinstance(value, bool) else None
        return word if word in get_args(cls.model_fields[info.field_name or ""].annotation) else value
