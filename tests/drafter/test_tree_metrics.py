"""Coverage, tree streaks and calibration against plain logits and known answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from drafter_cases import close_window, make_batch, make_learner, small_spec
from paceline.drafter.block_inputs import build_blocks
from paceline.drafter.tree import tree_streaks
from paceline.drafter.tree_metrics import TEMPERATURES, calibrated_temperature, evenly_spaced

LENGTHS = [20, 8, 31]


def test_calibration_finds_the_sampling_temperature():
    """Labels drawn at temperature 1.6 of the drafter's logits: the tree expects what it gets there."""
    random = np.random.default_rng(2)
    logits = random.normal(0, 2.5, (3000, 4, 12))
    chances = np.exp(logits / 1.6)
    chances /= chances.sum(2, keepdims=True)
    labels = (chances.cumsum(2) < random.random((3000, 4, 1))).sum(2)
    sums = []
    for temperature in TEMPERATURES:
        logs = torch.log_softmax(torch.from_numpy(logits) / temperature, dim=2)
        ranks = (logs > logs.gather(2, torch.from_numpy(labels)[..., None])).sum(2)
        live = torch.ones(3000, 4, dtype=torch.bool)
        found = tree_streaks(logs.sort(dim=2, descending=True).values, ranks, live, [8])
        sums.append([float(found.streaks.sum()), float(found.surrogates.sum())])
    assert calibrated_temperature(np.array(sums)) == pytest.approx(1.6, rel=0.05)
    assert calibrated_temperature(np.zeros((len(TEMPERATURES), 2))) is None


def test_blocks_are_chosen_evenly():
    assert evenly_spaced(10, 1.0).tolist() == list(range(10))
    assert evenly_spaced(100, 0.05).tolist() == [0, 20, 40, 60, 80]
    assert evenly_spaced(3, 0.01).tolist() == [0] and evenly_spaced(0, 0.5).tolist() == []


def test_diagnosis_agrees_with_plain_logits():
    spec = small_spec()
    learner = make_learner(spec, drafter={"diagnose_share": 1.0, "head_chunk": 7, "diagnose_every": 2})
    batch = make_batch(spec, LENGTHS, num_anchors=9)
    host, table = batch.host, build_blocks(batch.host, spec)
    blocks = F.embedding(torch.from_numpy(table.tokens), learner._embedding)
    with torch.no_grad():
        hidden = learner.network.training_forward(
            batch.features, host.lengths, host.anchors, host.anchor_counts, blocks
        )
        logits = hidden[:, 1:] @ learner._head.T
    learner.accumulate(batch)
    ratios = close_window(learner).ratios
    for k in (2, 4, 8, 16):
        top = logits.topk(k, dim=2).indices
        hit = (top == torch.from_numpy(table.labels)[..., None]).any(2).numpy() & table.live
        for j in range(3):
            ratio = ratios[f"coverage/top_{k}_slot_{j + 1}"]
            assert (ratio.numerator, ratio.denominator) == (hit[:, j].sum(), table.live[:, j].sum())
    assert ratios["tree/streak_256"].value >= ratios["tree/streak_16"].value >= ratios["acceptance/streak"].value
    assert ratios["tree/streak_16"].denominator == len(host.anchors)
    chances = logits.log_softmax(2)
    labels, live = torch.from_numpy(table.labels).clamp(min=0), torch.from_numpy(table.live)
    ranks = (chances > chances.gather(2, labels[..., None])).sum(2)
    found = tree_streaks(chances.topk(min(256, chances.shape[2]), dim=2).values, ranks, live, (64,))
    whole = live.all(1)
    assert 0 < int(whole.sum()) < len(whole), "blocks cut short and whole ones are both needed"
    expected = float(found.streaks[0][whole].sum() / found.surrogates[0][whole].sum())
    assert ratios["tree/surrogate_ratio_64"].value == pytest.approx(expected, rel=1e-4)
    learner.accumulate(batch)
    assert not any(name.startswith(("tree", "coverage")) for name in close_window(learner, 2).ratios)
