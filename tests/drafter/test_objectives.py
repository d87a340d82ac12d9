"""Weights, weightings and metrics against brute force written from their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from drafter_cases import close_window, make_batch, make_learner, small_spec
from torch.nn import functional as F

from paceline.drafter.block_inputs import build_blocks
from paceline.drafter.loss.decay import decay_weights, default_gamma
from paceline.drafter.loss.dpace import dpace_weights
from paceline.drafter.metrics import WindowMetrics, ratios_of


def test_decay_weights_are_those_of_the_paper():
    live = torch.ones(1, 15, dtype=torch.bool)
    found = decay_weights(torch.zeros(1, 15), live, 7.0, 0.5)[0]
    np.testing.assert_allclose(found, [math.exp(-(k - 1) / 7) for k in range(1, 16)], rtol=1e-6)
    live[0, 3:] = False
    assert decay_weights(torch.zeros(1, 15), live, 7.0, 0.5)[0, 3:].tolist() == [0.0] * 12
    assert [default_gamma(size) for size in (16, 10, 8, 4)] == [7.0, 5.0, 4.0, 2.0]
    assert all(default_gamma(size) < default_gamma(size + 1) for size in range(2, 40))


def brute_dpace(ce, live, alpha):
    q = [(1 - alpha) * math.exp(-c) + alpha if on else 1.0 for c, on in zip(ce, live, strict=True)]
    reach = [math.prod(q[: m + 1]) if live[m] else 0.0 for m in range(len(q))]
    return [sum(reach[j:]) if live[j] else 0.0 for j in range(len(q))]


def test_dpace_weights():
    ce = -torch.log(torch.tensor([[0.8, 0.5]]))
    live = torch.ones(1, 2, dtype=torch.bool)
    torch.testing.assert_close(dpace_weights(ce, live, 0.0, 0.5), torch.tensor([[1.575, 0.675]]))
    random = np.random.default_rng(0)
    for _ in range(50):
        ce = random.exponential(1.0, 6)
        live = random.random(6) < 0.7
        found = dpace_weights(torch.tensor(ce)[None], torch.tensor(live)[None], 0.0, 0.3)[0]
        np.testing.assert_allclose(found, brute_dpace(ce, live, 0.3), rtol=1e-12)


def brute_loss(learner, batches):
    """(Σ weighted loss, Σ weight) over windows with plain logits, slot by slot."""
    spec, settings = learner.spec, learner.objective
    numerator = denominator = 0.0
    for batch in batches:
        host = batch.host
        table = build_blocks(host, spec)
        blocks = F.embedding(torch.from_numpy(table.tokens), learner._embedding)
        hidden = learner.network.training_forward(
            batch.features, host.lengths, host.anchors, host.anchor_counts, blocks
        )
        logits = hidden @ learner._head.T
        per_sample = {}
        for a in range(len(host.anchors)):
            slots = [j + spec.first_draft_slot for j in range(spec.num_drafts)]
            ce = [
                float(F.cross_entropy(logits[a, slot], torch.tensor(table.labels[a, j])))
                for j, slot in enumerate(slots)
            ]
            live = table.live[a]
            if settings.name == "dpace":
                w = brute_dpace(ce, live, settings.alpha)
            else:
                w = [math.exp(-j / learner.gammas.at(0)) * on for j, on in enumerate(live)]
            pair = (sum(x * c for x, c in zip(w, ce, strict=True)), sum(w))
            if settings.weighting == "token":
                numerator, denominator = numerator + pair[0], denominator + pair[1]
            elif settings.weighting == "anchor":
                numerator, denominator = numerator + pair[0] / pair[1], denominator + 1
            else:
                per_sample.setdefault(table.documents[a], []).append(pair)
        for pairs in per_sample.values():
            numerator += sum(p[0] for p in pairs) / sum(p[1] for p in pairs)
            denominator += 1
    return numerator, denominator


@pytest.mark.parametrize("weighting", ["token", "anchor", "sample"])
@pytest.mark.parametrize("name", ["decay", "dpace"])
@pytest.mark.parametrize("sample_from_anchor", [False, True])
def test_window_loss_is_that_of_the_definition(weighting, name, sample_from_anchor):
    spec = small_spec(sample_from_anchor=sample_from_anchor)
    learner = make_learner(spec, objective={"weighting": weighting, "name": name})
    batches = [make_batch(spec, [20, 5, 9], seed=1), make_batch(spec, [40], seed=2, num_anchors=9)]
    with torch.no_grad():
        numerator, denominator = brute_loss(learner, batches)
    for batch in batches:
        learner.accumulate(batch)
    report = close_window(learner)
    assert report.loss.numerator == pytest.approx(numerator, rel=1e-5)
    assert report.loss.denominator == pytest.approx(denominator, rel=1e-5)


def test_streaks_are_means_over_blocks_not_products_of_marginals():
    """Blocks 1111 and 0000: τ is 3.0, while the product of marginals would say 1.94."""
    tally = WindowMetrics(4, torch.device("cpu"))
    correct = torch.tensor([[True] * 4, [False] * 4])
    tally.add_acceptance(correct, torch.ones(2, 4, dtype=torch.bool))
    ratios = ratios_of(tally.fetch(torch.zeros(0))[0], 4, 1)
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
    ratios = ratios_of(tally.fetch(torch.zeros(0))[0], 5, 1)
    streaks = [next((j for j in range(5) if not (live[b, j] and correct[b, j])), 5) for b in range(60)]
    assert ratios["acceptance/streak"].value == pytest.approx(sum(streaks) / 60)
    for j in range(5):
        reached = [b for b in range(60) if live[b, j] and streaks[b] >= j]
        marginal = [b for b in range(60) if live[b, j]]
        conditional = ratios[f"acceptance/slot_{j + 1}"]
        assert (conditional.numerator, conditional.denominator) == (sum(correct[b, j] for b in reached), len(reached))
        assert ratios[f"accuracy/slot_{j + 1}"].numerator == sum(correct[b, j] for b in marginal)
        assert ratios[f"accuracy/slot_{j + 1}"].denominator == len(marginal)
