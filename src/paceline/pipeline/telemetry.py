"""What the hub sees goes to a witness: spans of work, values read now and then. The trainer's observer is one."""

from __future__ import annotations

import time
from typing import Any, Protocol

from paceline.device import peak_allocated_bytes, peak_resident_bytes
from paceline.types import StepReport


class Telemetry(Protocol):
    """Takes in what happens; returns at once."""

    def span(self, process: str, row: str, name: str, start_s: float, end_s: float, **details: Any) -> None:
        """Work from ``start_s`` to ``end_s``, both of ``time.time()``."""
        ...

    def counter(self, process: str, name: str, at_s: float, **values: float) -> None:
        """Values at one moment, for a graph over time."""
        ...

    def gauge(self, name: str, value: float) -> None:
        """A value of the metric catalogue that is read rather than counted."""
        ...

    def note(self, text: str) -> None:
        """Something that the user should know."""
        ...


class NullTelemetry:
    """A witness that forgets everything."""

    def span(self, process: str, row: str, name: str, start_s: float, end_s: float, **details: Any) -> None:
        """Nothing."""

    def counter(self, process: str, name: str, at_s: float, **values: float) -> None:
        """Nothing."""

    def gauge(self, name: str, value: float) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


class RemoteObserver(NullTelemetry):
    """Stands where the observer does on a machine whose run is observed from another one."""

    def step(self, report: StepReport) -> None:
        """Nothing."""

    def event(self, kind: str, **fields: Any) -> None:
        """Nothing."""

    def newest(self, name: str) -> tuple[int, float] | None:
        """Nothing is known here."""
        return None

    def warn(self, text: str) -> None:
        """Nothing."""

    def close(self, status: str) -> None:
        """Nothing."""


class PeakMemory:
    """Most memory that this process has held, looked at no more than once in ``every_s`` seconds.

    Args:
        device: of the process; of several, joined by ``+``, the cards are added.
        every_s: between two looks.
    """

    def __init__(self, device: str, every_s: float = 1.0) -> None:
        self._device, self._every_s, self._next = device, every_s, 0.0

    def look(self) -> tuple[int, int] | None:
        """Peak resident bytes of the process, and of its CUDA allocator on its own device; None if not yet due."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + self._every_s
        return peak_resident_bytes(), peak_allocated_bytes(self._device)
