"""What the cards' sensors say, with a stand-in for the driver's library: no machine of the tests has a card."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.observe.catalogue import find
from paceline.pipeline.card_sensors import CardSensors


class NVMLError(Exception):
    pass


def library(asked: list[Any]) -> SimpleNamespace:
    def handle(name: Any) -> Any:
        asked.append(name)
        if name == 9:
            raise NVMLError("no such card")
        return name

    def clock(card: Any, kind: int) -> int:
        if card == 3:
            raise NVMLError("not supported")
        return 1000 + 10 * card

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetPowerUsage=lambda card: 100_000 + 1000 * card,
        nvmlDeviceGetTemperature=lambda card, kind: 40 + card,
        nvmlDeviceGetClockInfo=clock,
    )


def test_each_worker_has_the_readings_of_its_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setitem(sys.modules, "pynvml", library(asked))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,3")
    sensors = CardSensors({"target_0": "cuda:0+cuda:1", "drafter_0": "cuda:2", "drafter_1": "cpu"})
    assert asked == [2, 5, 3]
    found = sensors.look()
    assert found == {
        "worker/target_0/power_w": 207.0,
        "worker/target_0/temperature_c": 45.0,
        "worker/target_0/clock_mhz": 1020.0,
        "worker/drafter_0/power_w": 103.0,
        "worker/drafter_0/temperature_c": 43.0,
    }
    assert all(find(name).reduction == "last" for name in found)
    assert sensors.look() == {}, "not due again"


def test_without_cards_library_or_driver_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", library(asked))
    assert CardSensors({"target_0": "cpu"}).look() == {} and not asked
    assert CardSensors({"target_0": "cuda:9"}).look() == {} and asked == [9]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert CardSensors({"target_0": "cuda:0"}).look() == {}
