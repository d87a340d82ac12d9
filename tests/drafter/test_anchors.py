"""Anchors: eligibility, uniformity, keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.anchors import count_eligible, eligible_positions, sample_anchors

MASKS = st.lists(st.booleans(), min_size=0, max_size=60).map(lambda bits: np.array(bits, bool))


@given(MASKS)
def test_eligible_are_pairs_of_supervised_tokens(mask):
    expected = [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]
    assert eligible_positions(mask).tolist() == expected
    assert count_eligible(mask) == len(expected)


@given(MASKS, st.integers(1, 20), st.integers(0, 2**63), st.integers(0, 5), st.integers(0, 2**40))
def test_draws_are_ascending_distinct_and_as_many_as_asked(mask, limit, seed, epoch, sample):
    found = sample_anchors(mask, seed=seed, epoch=epoch, sample=sample, limit=limit)
    assert found.dtype == np.int64
    assert len(found) == min(limit, count_eligible(mask))
    assert (np.diff(found) > 0).all() and np.isin(found, eligible_positions(mask)).all()
    assert np.array_equal(found, sample_anchors(mask, seed=seed, epoch=epoch, sample=sample, limit=limit))


def test_draws_depend_on_the_whole_key_and_nothing_else():
    mask = np.ones(200, bool)
    before = np.random.get_state()[1].copy()
    key = {"seed": 1, "epoch": 2, "sample": 3}
    base = sample_anchors(mask, limit=50, **key)
    assert np.array_equal(before, np.random.get_state()[1])
    for name in key:
        assert not np.array_equal(base, sample_anchors(mask, limit=50, **{**key, name: 9}))
    # Swapped epoch and sample are another key.
    assert not np.array_equal(base, sample_anchors(mask, limit=50, seed=1, epoch=3, sample=2))


def test_a_draw_that_must_never_change():
    """Resuming on another machine or numpy version draws the same anchors."""
    assert sample_anchors(np.ones(40, bool), seed=0, epoch=1, sample=2, limit=6).tolist() == GOLDEN


GOLDEN = [5, 11, 13, 21, 27, 31]


def test_eligible_positions_are_drawn_equally_often():
    """χ² over 4,000 epochs: 30 positions, 5 a draw; the 99.9 % quantile of χ²(29) is 58.3, the 0.3 % one 12.5."""
    mask = np.ones(31, bool)
    counts = np.zeros(30)
    for epoch in range(4000):
        counts[sample_anchors(mask, seed=7, epoch=epoch, sample=11, limit=5)] += 1
    expected = 4000 * 5 / 30
    # Without replacement the variance of a count is smaller than binomial by (30 - 5) / (30 - 1).
    chi_square = (((counts - expected) ** 2) / expected).sum() * 29 / 25
    assert 12.5 < chi_square < 58.3


def test_neighboring_keys_draw_independently():
    """Overlap of draws of neighbouring samples and epochs is that of chance: 20 of 100, overlap 4 on average."""
    mask = np.ones(101, bool)
    overlaps = []
    for sample in range(300):
        one = sample_anchors(mask, seed=0, epoch=0, sample=sample, limit=20)
        for other in ({"epoch": 0, "sample": sample + 1}, {"epoch": 1, "sample": sample}):
            overlaps.append(len(np.intersect1d(one, sample_anchors(mask, seed=0, limit=20, **other))))
    assert abs(np.mean(overlaps) - 4) < 0.3
