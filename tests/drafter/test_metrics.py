"""Acceptance metrics against brute force written from their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.drafter.metrics import WindowMetrics, ratios_of


def test_streaks_are_means_over_blocks():
    """Blocks 1111 and 0000: τ is 3.0, while the product of marginals would say 1.94."""
    tally = WindowMetrics(4, torch.device("cpu"))
    correct = torch.tensor([[True] * 4, [False] * 4])
    tally.add_acceptance(correct, torch.ones(2, 4, dtype=torch.bool))
    ratios = ratios_of(tally.fetch()[0].sums, 4, 1)
    assert 1 + ratios["acceptance/streak"].value == 3.0
    assert [ratios[f"accuracy/slot_{k}"].value for k in (1, 2, 3, 4)] == [0.5] * 4
    assert [ratios[f"acceptance/slot_{k}"].value for k in (1, 2, 3, 4)] == [0.5, 1.0, 1.0, 1.0]


def test_acceptance_metrics_against_brute_force():
    random = np.random.default_rng(1)
    correct, lengths = random.random((60, 5)) < 0.7, random.integers(0, 6, 60)
    live = np.arange(5) < lengths[:, None]
    tally = WindowMetrics(5, torch.device("cpu"))
    for part in (slice(0, 13), slice(13, 60)):
        tally.add_acceptance(torch.from_numpy(correct[part]), torch.from_numpy(live[part]))
    ratios = ratios_of(tally.fetch()[0].sums, 5, 1)
    streaks = [next((j for j in range(5) if not (live[b, j] and correct[b, j])), 5) for b in range(60)]
    assert ratios["acceptance/streak"].value == pytest.approx(sum(streaks) / 60)
    for j in range(5):
        reached = [b for b in range(60) if live[b, j] and streaks[b] >= j]
        marginal = [b for b in range(60) if live[b, j]]
        conditional = ratios[f"acceptance/slot_{j + 1}"]
        assert (conditional.numerator, conditional.denominator) == (sum(correct[b, j] for b in reached), len(reached))
        assert ratios[f"accuracy/slot_{j + 1}"].numerator == sum(correct[b, j] for b in marginal)
        assert ratios[f"accuracy/slot_{j + 1}"].denominator == len(marginal)


def test_window_sums_lose_nothing_beside_large_ones():
    """In float32, 2 ** 24 + 1 is 2 ** 24."""
    metrics = WindowMetrics(1, torch.device("cpu"))
    for value in (2.0**24, *[1.0] * 100):
        metrics.add("x", torch.tensor([value]))
        metrics.add_loss(0, 0, torch.tensor(value), torch.tensor(1.0))
    sums = metrics.fetch()[0].sums
    assert sums["x"].tolist() == [2**24 + 100] and sums["loss/0"].tolist() == [2**24 + 100, 101]
