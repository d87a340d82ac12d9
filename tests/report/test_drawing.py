"""Smoothing and condensing of what is drawn."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.report.drawing import condensed, smoothed, tick


def test_smoothing_is_a_moving_ratio_of_sums():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=200), rng.uniform(1, 3, size=200)
    values[17], weights[40] = np.nan, np.nan
    result = smoothed(values, weights, share=0.05)
    for i in range(200):
        near = [j for j in range(max(i - 5, 0), min(i + 6, 200)) if j not in (17, 40)]
        assert result[i] == pytest.approx(sum(values[j] * weights[j] for j in near) / sum(weights[j] for j in near))


def test_condensing_keeps_the_mean_of_each_stretch():
    x, y = np.arange(1000), np.arange(1000) % 7 * 1.0
    few_x, few_y = condensed(x, y, points=10)
    assert few_x == pytest.approx([np.mean(x[i : i + 100]) for i in range(0, 1000, 100)])
    assert few_y == pytest.approx([np.mean(y[i : i + 100]) for i in range(0, 1000, 100)])


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (999, "999"), (12_000, "12k"), (2e-4, "2e-4"), (1.05e-3, "1.05e-3")]
)
def test_ticks_are_short(value: float, text: str) -> None:
    assert tick(value, 0) == text
