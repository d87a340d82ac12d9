"""Anchors and labels: eligibility, uniformity, keys, brute force."""

from __future__ import annotations

import numpy as np
from drafter_cases import make_host, small_spec
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.anchors import count_eligible, eligible_positions, sample_anchors
from paceline.drafter.block_inputs import build_blocks

MASKS = st.lists(st.booleans(), min_size=0, max_size=60).map(lambda bits: np.array(bits, bool))


@given(MASKS)
def test_eligible_are_pairs_of_supervised_tokens(mask):
    expected = [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]
    assert eligible_positions(mask).tolist() == expected
    assert count_eligible(mask) == len(expected)


@given(MASKS, st.integers(1, 20), st.integers(0, 2**63), st.integers(0, 5), st.integers(0, 2**40))
def test_draws_are_ascending_distinct_eligible_and_exactly_as_many(mask, limit, seed, epoch, sample):
    found = sample_anchors(mask, seed=seed, epoch=epoch, sample=sample, limit=limit)
    assert found.dtype == np.int64
    assert len(found) == min(limit, count_eligible(mask))
    assert (np.diff(found) > 0).all() and np.isin(found, eligible_positions(mask)).all()
    assert np.array_equal(found, sample_anchors(mask, seed=seed, epoch=epoch, sample=sample, limit=limit))


def test_draws_do_not_touch_the_global_stream_and_depend_on_every_part_of_the_key():
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


def test_every_eligible_position_is_drawn_equally_often():
    """χ² over 4,000 epochs: 30 positions, 5 a draw; the 99.9 % quantile of χ²(29) is 58.3, the 0.3 % one 12.5."""
    mask = np.ones(31, bool)
    counts = np.zeros(30)
    for epoch in range(4000):
        counts[sample_anchors(mask, seed=7, epoch=epoch, sample=11, limit=5)] += 1
    expected = 4000 * 5 / 30
    # Without replacement the variance of a count is smaller than binomial by (30 - 5) / (30 - 1).
    chi_square = (((counts - expected) ** 2) / expected).sum() * 29 / 25
    assert 12.5 < chi_square < 58.3


def test_neighbouring_keys_draw_independently():
    """Overlap of draws of neighbouring samples and epochs is that of chance: 20 of 100, overlap 4 on average."""
    mask = np.ones(101, bool)
    overlaps = []
    for sample in range(300):
        one = sample_anchors(mask, seed=0, epoch=0, sample=sample, limit=20)
        for other in ({"epoch": 0, "sample": sample + 1}, {"epoch": 1, "sample": sample}):
            overlaps.append(len(np.intersect1d(one, sample_anchors(mask, seed=0, limit=20, **other))))
    assert abs(np.mean(overlaps) - 4) < 0.3


def brute_labels(host, spec):
    """Token by token, from the words of the rule."""
    labels, live, tokens, row = [], [], [], 0
    for document, count in enumerate(host.anchor_counts):
        length = host.lengths[document]
        for anchor in host.anchors[row : row + count]:
            dead = False
            for draft in range(1, spec.num_drafts + 1):
                position = anchor + draft
                dead = dead or position >= length or not host.loss_mask[document, position]
                live.append(not dead)
                labels.append(0 if dead else host.ids[document, position])
            tokens.append([host.ids[document, anchor], *[spec.mask_token_id] * (spec.block_size - 1)])
        row += count
    return np.array(labels).reshape(-1, spec.num_drafts), np.array(live).reshape(-1, spec.num_drafts), np.array(tokens)


def test_labels_are_those_of_the_rule():
    for seed in range(20):
        for sample_from_anchor in (False, True):
            spec = small_spec(sample_from_anchor=sample_from_anchor, block_size=5)
            host = make_host(spec, [12, 1, 30, 4], seed=seed, num_anchors=7)
            table = build_blocks(host, spec)
            labels, live, tokens = brute_labels(host, spec)
            assert np.array_equal(table.labels, labels) and np.array_equal(table.live, live)
            assert np.array_equal(table.tokens, tokens)
            # Row m of the hidden states is the slot that says draft j: slot j + 1, or j when sampling from the anchor.
            anchor, draft = np.nonzero(live)
            slot = draft if sample_from_anchor else draft + 1
            assert np.array_equal(table.rows, anchor * 5 + slot)
            assert np.array_equal(table.labels.reshape(-1)[table.cells], labels[live])


def test_labels_never_cross_a_document():
    """An anchor three tokens before its document's end has two labels, though the next document follows."""
    spec = small_spec(block_size=8)
    host = make_host(spec, [10, 10], masks=[np.ones(10, bool)] * 2, num_anchors=99)
    table = build_blocks(host, spec)
    at_seven = np.flatnonzero((host.anchors == 7) & (table.documents == 0))[0]
    assert table.live[at_seven].tolist() == [True, True, False, False, False, False, False]


def test_the_supervised_labels_are_the_response_without_its_first_token():
    """Every answer token but the first is some block's label, in both modes: the first is the target's own."""
    mask = np.zeros(20, bool)
    mask[6:15] = True
    for sample_from_anchor in (False, True):
        spec = small_spec(sample_from_anchor=sample_from_anchor)
        host = make_host(spec, [20], masks=[mask], num_anchors=99)
        table = build_blocks(host, spec)
        positions = host.anchors[:, None] + 1 + np.arange(spec.num_drafts)
        assert sorted(set(positions[table.live])) == list(range(7, 15))
