"""What the anchor cap leaves, against all draws; sentences beside recipes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.data.coverage import anchor_coverage, passes_sentence


@pytest.mark.parametrize(("num_anchors", "block_size"), [(1, 2), (2, 3), (3, 4), (9, 4)])
def test_coverage_is_the_mean_over_all_draws(num_anchors: int, block_size: int) -> None:
    eligible = np.array([1, 4, 6, 6])
    reached = 0.0
    for total in eligible.tolist():
        draws = list(itertools.combinations(range(total), min(total, num_anchors)))
        for draw in draws:
            labels = {a + k for a in draw for k in range(1, block_size) if a + k <= total}
            reached += len(labels) / len(draws)
    found = anchor_coverage(eligible, num_anchors=num_anchors, block_size=block_size)
    assert found.covered_labels == pytest.approx(reached / eligible.sum())
    assert found.anchors == sum(min(e, num_anchors) for e in eligible.tolist())
    assert found.eligible == 17 and found.capped_samples == sum(e > num_anchors for e in eligible.tolist())


def test_a_row_cap_leaves_most_labels_of_long_samples_out() -> None:
    short = anchor_coverage(np.array([186]), num_anchors=512, block_size=16)
    long = anchor_coverage(np.array([100_000]), num_anchors=512, block_size=16)
    assert short.covered_labels == 1.0 and short.anchors == 186
    assert 0.05 < long.covered_labels < 0.08 and long.anchors == 512


def test_rows_and_epochs_stand_beside_published_recipes() -> None:
    assert passes_sentence(1_600_000, 8).startswith("1,600,000 rows × 8 epochs = 12,800,000 rows trained; published")
    assert "48,000 rows trained, 1.0% of the smallest recipe; published" in passes_sentence(8000, 6)
