"""What a check of the diagnosis gives, and what several checks ask of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from paceline.observe.run_history import History

MIN_LINES = 20
"""Fewer lines than this are not judged by checks that look at single lines."""


@dataclass(frozen=True)
class Finding:
    """One thing that the numbers say.

    Attributes:
        key: stable name; a warning is told once a run.
        level: ``warning`` for what should be looked at, ``info`` for what is worth knowing.
        text: what was seen, with figures.
        advice: what to do about it; empty where nothing is to be done.
    """

    key: str
    level: Literal["info", "warning"]
    text: str
    advice: str = ""

    @property
    def sentence(self) -> str:
        """What was seen and what to do, for one line of a terminal."""
        return f"{self.text} {self.advice[0].upper()}{self.advice[1:]}." if self.advice else self.text


def setting(run: History, section: str, name: str) -> Any:
    """A resolved setting of the run; None where the settings are not there."""
    values = run.settings.get(section)
    return values.get(name) if isinstance(values, dict) else None


def ranges(numbers: list[int]) -> str:
    """``[3, 4, 5, 9]`` → ``3–5, 9``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}–{high}" if high > low else str(low) for low, high in parts)
