"""Power, temperature and clock of the cards that workers compute on, where the machine reports them (extra ``nvml``).

Read in the parent, which asks the driver's library and touches no card itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any


class CardSensors:
    """Readings of NVIDIA cards; none where the package ``nvidia-ml-py`` or a driver is missing.

    Args:
        devices: of each worker by its key, as in the settings: ``cuda:1``, or several joined by ``+``.
        every_s: between two readings.
    """

    def __init__(self, devices: Mapping[str, str], every_s: float = 2.0) -> None:
        self._every_s, self._next = every_s, 0.0
        self._nvml: Any = None
        cards = {worker: _numbers(device) for worker, device in devices.items()}
        if any(cards.values()):
            self._nvml = _library()
        self._handles = {worker: [self._handle(number) for number in numbers] for worker, numbers in cards.items()}

    def look(self) -> dict[str, float]:
        """Values of the metric catalogue since the last look; empty where none is due.

        Of a worker on several cards: the sum of the power, the highest temperature, the lowest clock.
        """
        now = time.monotonic()
        if self._nvml is None or now < self._next:
            return {}
        self._next = now + self._every_s
        nvml = self._nvml
        readings: tuple[tuple[str, Callable[[Any], float], Callable[[list[float]], float]], ...] = (
            ("power_w", lambda card: nvml.nvmlDeviceGetPowerUsage(card) / 1000, sum),
            ("temperature_c", lambda card: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU), max),
            ("clock_mhz", lambda card: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM), min),
        )
        found: dict[str, float] = {}
        for worker, handles in self._handles.items():
            for name, read, joined in readings:
                values = [
                    value for card in handles if card is not None and (value := self._read(read, card)) is not None
                ]
                if values:
                    found[f"worker/{worker}/{name}"] = float(joined(values))
        return found

    def _read(self, read: Callable[[Any], float], card: Any) -> float | None:
        """One reading; None where this card is not known, has no such sensor, or is lost."""
        try:
            return None if card is None else read(card)
        except self._nvml.NVMLError:
            return None

    def _handle(self, number: int) -> Any:
        """The driver's card of a CUDA number, which counts the visible cards alone."""
        if self._nvml is None:
            return None
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        name = visible[number] if number < len(visible) else str(number)
        try:
            if name.isdigit():
                return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
            return self._nvml.nvmlDeviceGetHandleByUUID(name)
        except self._nvml.NVMLError:
            return None


def _numbers(device: str) -> list[int]:
    parts = [name.partition(":") for name in device.split("+")]
    return [int(number or 0) for kind, _, number in parts if kind == "cuda"]


def _library() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
