"""What the slots of a block hold and must say, against brute force."""

from __future__ import annotations

import numpy as np

from drafter_cases import make_host, small_spec
from paceline.drafter.block_inputs import build_blocks


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


def test_the_teacher_of_a_slot_is_the_token_before_its_label():
    spec = small_spec(block_size=5)
    host = make_host(spec, [12, 1, 30, 4], seed=3, num_anchors=7)
    table = build_blocks(host, spec)
    packed = np.concatenate([host.ids[row, :length] for row, length in enumerate(host.lengths)])
    assert len(table.teacher_rows) and np.array_equal(packed[table.teacher_rows + 1], table.labels[table.live])


def test_labels_never_cross_a_document():
    """An anchor three tokens before its document's end has two labels, though the next document follows."""
    spec = small_spec(block_size=8)
    host = make_host(spec, [10, 10], masks=[np.ones(10, bool)] * 2, num_anchors=99)
    table = build_blocks(host, spec)
    at_seven = np.flatnonzero((host.anchors == 7) & (table.documents == 0))[0]
    assert table.live[at_seven].tolist() == [True, True, False, False, False, False, False]


def test_labels_are_the_response_without_its_first_token():
    """Every answer token but the first is some block's label, in both modes: the first is the target's own."""
    mask = np.zeros(20, bool)
    mask[6:15] = True
    for sample_from_anchor in (False, True):
        spec = small_spec(sample_from_anchor=sample_from_anchor)
        host = make_host(spec, [20], masks=[mask], num_anchors=99)
        table = build_blocks(host, spec)
        positions = host.anchors[:, None] + 1 + np.arange(spec.num_drafts)
        assert sorted(set(positions[table.live])) == list(range(7, 15))
