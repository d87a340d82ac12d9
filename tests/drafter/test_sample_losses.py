"""Each sample's own loss in a step report: what the sample has alone."""

from __future__ import annotations

import pytest
from drafter_cases import close_window, make_batch, make_learner, pick, small_spec

LENGTHS = [10, 20, 7, 60, 3, 33]


@pytest.mark.parametrize("limit", [None, 40])
def test_every_sample_has_the_loss_that_it_has_alone(limit: int | None) -> None:
    spec = small_spec()
    whole = make_batch(spec, LENGTHS, num_anchors=12)
    learner = make_learner(spec, drafter={"positions_per_pass": limit})
    learner.accumulate(whole)
    report = close_window(learner)
    (found,) = report.sample_losses.values()
    assert list(report.sample_losses) == list(report.batches) and found.shape == (6, 2)
    for place in range(len(LENGTHS)):
        alone = make_learner(spec)
        alone.accumulate(pick(whole, [place]))
        loss = close_window(alone).loss
        assert found[place] == pytest.approx([loss.numerator, loss.denominator], rel=1e-5)
    assert found.sum(0) == pytest.approx([report.loss.numerator, report.loss.denominator], rel=1e-6)
