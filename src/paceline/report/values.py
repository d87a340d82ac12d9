"""Values of a run's files as the report shows them."""

from __future__ import annotations

import math
from typing import Any


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and an ellipsis where it is longer than ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def whole_numbers(value: Any) -> list[int]:
    """The members of a list that are integers; nothing where there is no list."""
    return [number for number in value if isinstance(number, int)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number; None for anything else, booleans too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None
