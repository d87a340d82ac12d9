"""The chunked head equals plain logits; the frozen head gets nothing."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from drafter_cases import close_window, make_batch, make_learner, small_spec
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config import DrafterConfig
from paceline.drafter.loss import HEADS, choose_head
from paceline.drafter.loss import tiled_ce as head_module
from paceline.drafter.loss.tiled_ce import head_cross_entropy
from paceline.errors import DrafterError


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
    monkeypatch.setitem(head_module.VOCABULARY_TILE, "cpu", tile)
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
    monkeypatch.setitem(head_module.VOCABULARY_TILE, "cpu", 4)
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
    monkeypatch.setitem(head_module.VOCABULARY_TILE, "cpu", 64)
    hidden, head, labels = tensors(count, 8, 4096)
    with Largest() as largest:
        head_cross_entropy(hidden, head, labels, 128)[0].sum().backward()
    assert largest.elements <= max(4096 * 8, 128 * 64, count * 8)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
@pytest.mark.parametrize(("count", "chunk"), [(1, 10), (64, 7), (64, 1000)])
def test_torchs_head_equals_own(count, chunk):
    hidden, head, labels = tensors(count, 6, 101)
    weights = torch.linspace(0.1, 2, count)
    found = []
    for name in ("own", "torch"):
        losses, correct = choose_head(name, torch.device("cpu"))(hidden, head, labels, chunk)
        found.append((losses, torch.autograd.grad((losses * weights).sum(), hidden)[0], correct))
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(its, mine, rtol=1e-6, atol=1e-6)
    assert head.grad is None


def test_ligers_part_is_scaled_slot_by_slot(monkeypatch):
    """A stand-in with liger's habits (one scale for all slots); its kernels themselves need a GPU."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, head, labels):
            logits = hidden @ head.T
            ctx.save_for_backward((logits.softmax(1) - F.one_hot(labels, len(head))) @ head)
            return F.cross_entropy(logits, labels, reduction="none")

        @staticmethod
        def backward(ctx, gradient):
            return ctx.saved_tensors[0] * gradient[0], None, None

    def make(reduction, return_predicted_tokens):
        assert reduction == "none" and return_predicted_tokens
        return lambda head, hidden, labels: types.SimpleNamespace(
            loss=Loss.apply(hidden, head, labels), predicted_tokens=(hidden @ head.T).argmax(1)
        )

    module = types.SimpleNamespace(LigerFusedLinearCrossEntropyLoss=make)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", types.ModuleType("liger_kernel.transformers"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.fused_linear_cross_entropy", module)
    hidden, head, labels = tensors(20, 6, 101)
    weights = torch.linspace(0.1, 2, 20)
    expected, right = head_cross_entropy(hidden, head, labels, 8)
    losses, correct = HEADS["liger"](hidden, head, labels, 8)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    slopes = [torch.autograd.grad((each * weights).sum(), hidden)[0] for each in (losses, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)
    assert torch.equal(correct, right) and head.grad is None
    with torch.no_grad():
        torch.testing.assert_close(HEADS["liger"](hidden, head, labels, 8)[0], expected, rtol=1e-6, atol=1e-6)


def test_heads_that_cannot_run_are_refused_in_words(monkeypatch):
    with pytest.raises(DrafterError, match=r"drafter\.head = liger: its kernels need a CUDA device"):
        choose_head("liger", torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DrafterError, match=r"drafter.head = liger: the package is not installed; pip install"):
        choose_head("liger", torch.device("cuda"))
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(DrafterError, match=r"drafter\.head = torch: torch .* has no chunked"):
        choose_head("torch", torch.device("cpu"))
    with pytest.raises(ValueError, match="rounds its losses to bfloat16"):
        DrafterConfig(head="torch")


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
def test_a_learner_trains_alike_with_torchs_head():
    spec = small_spec()
    reports = []
    for head in ("own", "torch"):
        learner = make_learner(spec, drafter={"head": head})
        learner.accumulate(make_batch(spec, [20, 31]))
        reports.append((close_window(learner), [p.detach() for p in learner.network.parameters()]))
    (mine, weights), (its, other) = reports
    assert its.loss.value == pytest.approx(mine.loss.value, rel=1e-6)
    assert its.ratios["accuracy/all"] == mine.ratios["accuracy/all"]
    assert its.gradient_norm == pytest.approx(mine.gradient_norm, rel=1e-5)
    torch.testing.assert_close(weights, other, rtol=1e-4, atol=1e-4)
    with pytest.raises(DrafterError, match="knows cross entropy only"):
        make_learner(spec, drafter={"head": "torch"}, objective={"terms": {"ce": 1.0, "kl": 1.0}})
