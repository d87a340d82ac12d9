"""Schedules, by their definitions."""

from __future__ import annotations

import itertools
import math

import pytest

from paceline.config import OptimizerConfig
from paceline.drafter.optimizer import learning_rates
from paceline.drafter.schedule import Schedule


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize(("start", "end"), [(1.0, 0.25), (0.0, 0.5)])
def test_ends_and_monotony(shape, start, end):
    schedule = Schedule(shape, start, end, 10, 110)
    values = [schedule.at(step) for step in range(150)]
    last = start if shape == "constant" else end
    assert values[:11] == [start] * 11 and values[110:] == pytest.approx([last] * 40)
    sign = 1 if end > start else -1
    assert all(sign * (b - a) >= 0 for a, b in itertools.pairwise(values))


def test_shapes_midway():
    assert Schedule("linear", 1, 0, 0, 100).at(25) == pytest.approx(0.75)
    assert Schedule("cosine", 1, 0, 0, 100).at(25) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert Schedule("wsd", 1, 0, 0, 100).at(79) == 1.0
    assert Schedule("wsd", 1, 0, 0, 100).at(90) == pytest.approx(0.5)


def test_learning_rate_rises_then_follows_its_shape():
    rates = learning_rates(OptimizerConfig(lr=1.0, schedule="linear", warmup=0.1, final_lr=0.1), 100)
    rise = [rates.at(step) for step in range(10)]
    assert rise == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates.at(10) == 1.0 and rates.at(55) == pytest.approx(0.55) and 0.1 < rates.at(99) < 0.12


def test_one_step_runs_train():
    assert learning_rates(OptimizerConfig(lr=1.0), 1).at(0) > 0
