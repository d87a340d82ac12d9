"""What may be wrong with a run, found in its metrics and said in sentences.

In comes the history of a run; out come findings, the worst first, each with what to do. Each check is a function from a
history to findings; its thresholds are beside it with the reason for them. `diagnose.diagnose` runs them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIN_LINES = 20
"""Fewer lines than this are not judged by checks that look at single lines."""


@dataclass(frozen=True)
class Finding:
    """One thing that the numbers say.

    Attributes:
        key: stable name; a warning is shown once a run.
        level: ``warning`` for what should be looked at, ``info`` for what is worth knowing.
        text: what was seen, with figures.
        advice: what to do about it; empty where there is nothing to do.
    """

    key: str
    level: Literal["info", "warning"]
    text: str
    advice: str = ""

    @property
    def sentence(self) -> str:
        """What was seen and what to do, for one line of a terminal."""
        return f"{self.text} {self.advice[0].upper()}{self.advice[1:]}." if self.advice else self.text
