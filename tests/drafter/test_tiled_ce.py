"""The chunked head equals plain logits; the frozen head gets nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.drafter.loss import tiled_ce
from paceline.drafter.loss.tiled_ce import head_cross_entropy


def tensors(count, size, vocabulary, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, size, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(vocabulary, size, generator=generator).to(dtype).requires_grad_()
    labels = np.random.default_rng(count).integers(0, vocabulary, count)
    return hidden, head, labels


@pytest.mark.parametrize("count", [1, 7, 64])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("tile", [1, 8, 37, 500])
def test_equals_plain_logits(monkeypatch, count, chunk, tile):
    monkeypatch.setitem(tiled_ce.VOCABULARY_TILE, "cpu", tile)
    hidden, head, labels = tensors(count, 6, 101)
    weights = torch.linspace(0.1, 2, count)
    logits = hidden @ head.detach().T
    reference = F.cross_entropy(logits, torch.from_numpy(labels), reduction="none")
    (expected,) = torch.autograd.grad((reference * weights).sum(), hidden)
    losses, correct = head_cross_entropy(hidden, head, labels, chunk)
    (found,) = torch.autograd.grad((losses * weights).sum(), hidden)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, reference, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(correct, logits.argmax(1) == torch.from_numpy(labels))


def test_float64_to_rounding_and_gradcheck():
    hidden, head, labels = tensors(9, 4, 30, torch.float64)
    head = head.detach()
    reference = F.cross_entropy(hidden @ head.T, torch.from_numpy(labels), reduction="none")
    torch.testing.assert_close(head_cross_entropy(hidden, head, labels, 4)[0], reference, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(lambda h: head_cross_entropy(h, head, labels, 4)[0], (hidden,))


def test_no_gradient_reaches_the_frozen_head():
    hidden, head, labels = tensors(5, 4, 30)
    head_cross_entropy(hidden, head, labels, 4)[0].sum().backward()
    assert head.grad is None and hidden.grad is not None


def test_equal_logits_count_only_for_the_first_token(monkeypatch):
    """Greedy decoding takes the first of equal logits; here tokens 2, 5 and 9 tie, across tiles of 4."""
    monkeypatch.setitem(tiled_ce.VOCABULARY_TILE, "cpu", 4)
    head = torch.zeros(12, 2)
    head[[2, 5, 9]] = 1.0
    labels = np.array([2, 5, 9, 0])
    _, correct = head_cross_entropy(torch.ones(4, 2), head, labels, 10)
    assert correct.tolist() == [True, False, False, False]


def test_extreme_logits_stay_finite():
    hidden, head, labels = tensors(6, 4, 50)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    losses, _ = head_cross_entropy(hidden, head, labels, 2)
    losses.sum().backward()
    reference = F.cross_entropy(hidden.double() @ head.double().T, torch.from_numpy(labels), reduction="none")
    assert torch.isfinite(losses).all() and torch.isfinite(hidden.grad).all()
    torch.testing.assert_close(losses.double(), reference, rtol=1e-5, atol=1e-3)


def test_bfloat16_is_near_float32_and_losses_are_float32():
    hidden, head, labels = tensors(40, 16, 300)
    losses, _ = head_cross_entropy(hidden.bfloat16(), head.bfloat16(), labels, 16)
    assert losses.dtype == torch.float32
    exact, _ = head_cross_entropy(hidden, head, labels, 16)
    assert (losses - exact).abs().mean() < 0.02 * exact.mean()


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return output


@pytest.mark.parametrize("count", [256, 1024])
def test_no_tensor_of_all_logits_exists(monkeypatch, count):
    """Nothing is larger than the head itself, one tile of a chunk, or the gradient by the hidden states."""
    monkeypatch.setitem(tiled_ce.VOCABULARY_TILE, "cpu", 64)
    hidden, head, labels = tensors(count, 8, 4096)
    with Largest() as largest:
        head_cross_entropy(hidden, head, labels, 128)[0].sum().backward()
    assert largest.elements <= max(4096 * 8, 128 * 64, count * 8)


def test_softmax_is_float32_in_bfloat16(monkeypatch):
    """Logits that bfloat16 holds exactly: loss and gradient are off by float32's rounding, not by bfloat16's."""
    monkeypatch.setitem(tiled_ce.VOCABULARY_TILE, "cpu", 64)
    head = torch.randn(500, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    hidden = torch.eye(8).bfloat16().repeat(3, 1).requires_grad_()
    labels = np.random.default_rng(0).integers(0, 500, 24)
    losses, _ = head_cross_entropy(hidden, head, labels, 10)
    logits = (hidden.detach().double() @ head.double().T).requires_grad_()
    exact = F.cross_entropy(logits, torch.from_numpy(labels), reduction="none")
    torch.testing.assert_close(losses.double(), exact, rtol=1e-6, atol=1e-6)
    losses.sum().backward()
    (slope,) = torch.autograd.grad(exact.sum(), logits)
    torch.testing.assert_close(hidden.grad.double(), slope @ head.double(), rtol=0.02, atol=2e-3)
