"""What a check says: one line, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "skipped"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of one check.

    Attributes:
        name: of the check.
        status: ``skipped`` where another check, on which it builds, failed, or where there is nothing to check.
        detail: what was seen.
        advice: what to do; empty where there is nothing to do.
        figures: the same in numbers, for programs.
        seconds: wall time of the check; filled in by who ran it.
    """

    name: str
    status: Status
    detail: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
