"""Slot weights against brute force written from their definitions."""

from __future__ import annotations

import math

import numpy as np
import torch

from drafter_cases import slow_dpace
from paceline.drafter.loss.weights import decay_weights, default_gamma, dpace_weights


def test_decay_weights_are_those_of_the_paper():
    live = torch.ones(1, 15, dtype=torch.bool)
    found = decay_weights(torch.zeros(1, 15), live, 7.0, 0.5)[0]
    np.testing.assert_allclose(found, [math.exp(-(k - 1) / 7) for k in range(1, 16)], rtol=1e-6)
    live[0, 3:] = False
    assert decay_weights(torch.zeros(1, 15), live, 7.0, 0.5)[0, 3:].tolist() == [0.0] * 12
    assert [default_gamma(size) for size in (16, 10, 8, 4)] == [7.0, 5.0, 4.0, 2.0]
    assert all(default_gamma(size) < default_gamma(size + 1) for size in range(2, 40))


def test_dpace_weights():
    ce = -torch.log(torch.tensor([[0.8, 0.5]]))
    live = torch.ones(1, 2, dtype=torch.bool)
    torch.testing.assert_close(dpace_weights(ce, live, 0.0, 0.5), torch.tensor([[1.575, 0.675]]))
    random = np.random.default_rng(0)
    for _ in range(50):
        ce = random.exponential(1.0, 6)
        live = random.random(6) < 0.7
        found = dpace_weights(torch.tensor(ce)[None], torch.tensor(live)[None], 0.0, 0.3)[0]
        np.testing.assert_allclose(found, slow_dpace(ce, live, 0.3), rtol=1e-12)
