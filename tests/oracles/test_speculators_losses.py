"""Losses, slot weights, accuracy and acceptance against the published `speculators` on the same logits.

Where its definition differs, and why ours is kept: it divides Σ w·loss by the number of supervised slots, we by Σ w
(a divisor that knows the weights); so its value times that number over our Σ w is compared, and gradients likewise.
Its labels are the teacher's argmax, ours the text, which is the target's own; here both are the same. It draws anchors
over a packed row and lets labels run on past a gap in the mask or into the next document; here every block is whole up
to its end.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from paceline.drafter.loss.distillation import distillation_loss
from paceline.drafter.loss.weights import SLOT_WEIGHTS
from paceline.drafter.metrics import WindowMetrics, ratios_of

pytestmark = pytest.mark.oracle
BLOCKS, SLOTS, VOCABULARY, GAMMA, ALPHA = 12, 5, 17, 2.5, 0.4
TERMS = {"ce": "ce", "kl_div": "kl", "tv": "tv"}


@pytest.fixture(scope="module")
def case():
    random = np.random.default_rng(3)
    teacher = random.normal(0, 2, (BLOCKS, SLOTS, VOCABULARY))
    logits = 0.7 * teacher + random.normal(0, 1.2, teacher.shape)
    mask = np.arange(SLOTS) < random.integers(2, SLOTS + 1, BLOCKS)[:, None]
    mask[:, 0] = False
    return logits, teacher, mask


@pytest.fixture(scope="module")
def theirs(ask, case):
    logits, teacher, mask = case
    request = {"logits": logits.tolist(), "teacher": teacher.tolist(), "mask": mask.astype(int).tolist()}
    place = ask("run_speculators_losses.py", {**request, "gamma": GAMMA, "alpha": ALPHA})
    return json.loads((place / "answer.json").read_text())


@pytest.mark.parametrize(("term", "weights"), [("ce", "decay"), ("ce", "dpace"), ("kl_div", "decay"), ("tv", "decay")])
def test_losses_and_gradients(theirs, case, term, weights):
    logits, teacher, mask = case
    live = torch.from_numpy(mask[:, 1:])
    labels = teacher[:, 1:].argmax(2)
    # Logits as hidden states under an identity head, so that gradients by logits can be compared.
    hidden = torch.from_numpy(logits[:, 1:][mask[:, 1:]]).requires_grad_()
    rows = torch.from_numpy(teacher[:, 1:][mask[:, 1:]])
    eye = torch.eye(VOCABULARY, dtype=torch.float64)
    found = distillation_loss(hidden, eye, labels[mask[:, 1:]], {TERMS[term]: 1.0}, lambda r: r, rows, 100)
    grid = torch.zeros(live.shape, dtype=torch.float64)
    w = SLOT_WEIGHTS[weights](grid.masked_scatter(live, found.cross_entropy), live, GAMMA, ALPHA)
    total = (w * grid.masked_scatter(live, found.loss)).sum()
    (gradient,) = torch.autograd.grad(total, hidden)
    answer = theirs[f"{term} {'dpace' if weights == 'dpace' else 'fixed-exp-decay'}"]
    slots = mask.sum()
    assert float(total.detach()) / slots == pytest.approx(answer["loss"], rel=1e-4)
    expected = torch.tensor(answer["gradient"], dtype=torch.float64)[:, 1:][live]
    torch.testing.assert_close(gradient / slots, expected, rtol=1e-4, atol=1e-7)


def test_accuracy_and_acceptance(theirs, case):
    logits, teacher, mask = case
    correct = torch.from_numpy(logits[:, 1:].argmax(2) == teacher[:, 1:].argmax(2))
    tally = WindowMetrics(SLOTS - 1, torch.device("cpu"))
    tally.add_acceptance(correct, torch.from_numpy(mask[:, 1:]))
    ratios = ratios_of(tally.fetch()[0].sums, SLOTS - 1, 1)
    metrics = theirs["ce fixed-exp-decay"]["metrics"]
    for slot in range(1, SLOTS):
        ratio = ratios[f"accuracy/slot_{slot}"]
        assert ratio.numerator == metrics[f"position_{slot}_acc_sum"]
        assert ratio.denominator == metrics[f"position_{slot}_acc_total"]
    assert 1 + ratios["acceptance/streak"].value == pytest.approx(metrics["eal_sum"] / metrics["eal_total"])
