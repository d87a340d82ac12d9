"""Attention backends against brute force and against each other: values and gradients."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from drafter_cases import SHAPES, attention_inputs, layout_of
from paceline.drafter.attention import BACKENDS, decode_attention, split
from paceline.drafter.attention.dense import visible
from paceline.drafter.attention.layout import Layout
from paceline.errors import DrafterError


def brute_force(shape, window, causal) -> np.ndarray:
    """Every pair of (slot, key), one by one, from the words of the rule."""
    lengths, anchors, counts, slots = shape
    context = [(d, p) for d, n in enumerate(lengths) for p in range(n)]
    blocks = [(d, a) for d, a in zip(np.repeat(np.arange(len(counts)), counts), anchors, strict=True)]
    queries = [(b, d, a, k) for b, (d, a) in enumerate(blocks) for k in range(slots)]
    mask = np.zeros((len(queries), len(context) + len(queries)), bool)
    for row, (block, document, anchor, slot) in enumerate(queries):
        here = anchor + slot
        for column, (other, position) in enumerate(context):
            if other == document and position < anchor and (window is None or here - position < window):
                mask[row, column] = True
        for column, (other_block, _, other_anchor, other_slot) in enumerate(queries):
            there = other_anchor + other_slot
            if other_block == block and not (causal and there > here) and (window is None or here - there < window):
                mask[row, len(context) + column] = True
    return mask


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_mask_is_the_rule(shape, window, causal):
    assert np.array_equal(visible(layout_of(shape), window, causal).numpy(), brute_force(shape, window, causal))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slots_at_once", [1, 8, 64])
def test_split_equals_dense(monkeypatch, shape, window, causal, slots_at_once):
    monkeypatch.setitem(split.SLOTS_AT_ONCE, "cpu", slots_at_once)
    layout = layout_of(shape)
    for reference, found in zip(*(result(name, layout, window, causal) for name in ("dense", "split")), strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-10, atol=1e-10)


def result(name, layout, window, causal):
    """Output of a backend and the gradients of its inputs."""
    tensors = attention_inputs(layout, seed=3)
    output = BACKENDS[name](*tensors, layout, window, causal)
    weight = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view(output.shape)
    (output * weight).sum().backward()
    return [output.detach(), *(tensor.grad for tensor in tensors)]


@pytest.mark.parametrize("multiple", [3, split.HALF_WIDTHS])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_widths_rounded_up_change_nothing(monkeypatch, shape, window, multiple):
    monkeypatch.setattr(split, "width_multiple", lambda query: multiple)
    monkeypatch.setitem(split.SLOTS_AT_ONCE, "cpu", 8)
    layout = layout_of(shape)
    for reference, found in zip(*(result(name, layout, window, False) for name in ("dense", "split")), strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-10, atol=1e-10)


def test_sixteen_bit_widths_are_rounded_up():
    layout = layout_of(SHAPES[0])
    tensors = [tensor.detach() for tensor in attention_inputs(layout, seed=3)]
    half = [tensor.bfloat16() for tensor in tensors]
    assert split.width_multiple(half[0]) == split.HALF_WIDTHS and split.width_multiple(tensors[0].float()) == 1
    reference = BACKENDS["dense"](*[tensor.double() for tensor in half], layout, None, False)
    torch.testing.assert_close(BACKENDS["split"](*half, layout, None, False).double(), reference, rtol=0.05, atol=0.05)


def test_split_equals_dense_on_random_layouts(monkeypatch):
    monkeypatch.setitem(split.SLOTS_AT_ONCE, "cpu", 12)
    random = np.random.default_rng(0)
    for trial in range(25):
        lengths = random.integers(1, 40, random.integers(1, 5))
        anchors = [np.sort(random.choice(n + 1, random.integers(0, min(n, 9) + 1), replace=False)) for n in lengths]
        counts = np.array([len(found) for found in anchors])
        if counts.sum() == 0:
            continue
        shape = (lengths, np.concatenate(anchors), counts, int(random.integers(2, 7)))
        layout = layout_of(shape)
        for window, causal in itertools.product([None, int(random.integers(1, 30))], [False, True]):
            tensors = attention_inputs(layout, trial)
            reference = BACKENDS["dense"](*tensors, layout, window, causal)
            torch.testing.assert_close(BACKENDS["split"](*tensors, layout, window, causal), reference)


@pytest.mark.parametrize("anchors", [[9], [12], [0], [12, 3, 7, 0]])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_equal_dense(anchors, window, causal):
    """One block a sequence, each with room for 12 tokens; what lies at and after the anchor is not looked at."""
    layout = layout_of(([12] * len(anchors), anchors, [1] * len(anchors), 4))
    with torch.no_grad():
        tensors = [tensor.detach() for tensor in attention_inputs(layout, seed=3)]
        reference = BACKENDS["dense"](*tensors, layout, window, causal)
        for row, anchor in enumerate(anchors):
            for tensor in tensors[1:3]:
                tensor[:, row * 12 + anchor : row * 12 + 12] = 1e6
        torch.testing.assert_close(decode_attention(*tensors, layout, window, causal), reference)


def test_bad_layouts_are_refused():
    device = torch.device("cpu")
    for lengths, anchors, counts, text in [
        ([4], [1, 2], [1], "do not fit"),
        ([4], [5], [1], "outside"),
        ([4], [2, 1], [2], "ascending"),
    ]:
        with pytest.raises(DrafterError, match=text):
            Layout.of(np.array(lengths), np.array(anchors), np.array(counts), 2, device)
