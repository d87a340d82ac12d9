"""The head by liger-kernel: the real kernels under Triton's interpreter where they are installed, and a stand-in."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from paceline.drafter.loss import HEADS, choose_head
from paceline.drafter.loss.tiled_ce import head_cross_entropy
from paceline.errors import DrafterError

MISSING = [name for name in ("triton", "liger_kernel") if importlib.util.find_spec(name) is None]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 16, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(101, 16, generator=generator).to(dtype)
    return hidden, head, np.random.default_rng(0).integers(0, 101, 20)


def compare() -> dict[str, float]:
    """Largest differences between liger's head and the tiled one; run with Triton's interpreter on."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        hidden, head, labels = inputs(dtype)
        weights = torch.linspace(0.1, 2, 20)
        (mine, right), (theirs, correct) = (HEADS[name](hidden, head, labels, 8) for name in ("tiled", "liger"))
        slopes = [torch.autograd.grad((each * weights).sum(), hidden)[0].float() for each in (mine, theirs)]
        with torch.no_grad():
            quiet = HEADS["liger"](hidden, head, labels, 8)[0]
        name = str(dtype).removeprefix("torch.")
        found[f"{name} loss"] = float(((mine - theirs) / mine).abs().max())
        found[f"{name} gradient"] = float((slopes[0] - slopes[1]).norm() / slopes[0].norm())
        found[f"{name} hits"] = int((right != correct).sum())
        found[f"{name} without gradient"] = float((theirs.detach() - quiet).abs().max())
    return found


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} (1 GB installed)")
def test_the_real_kernels_equal_the_tiled_head() -> None:
    script = "import json, test_liger_ce; print(json.dumps(test_liger_ce.compare()))"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["float32 loss"] < 2e-6 and found["float32 gradient"] < 2e-6
    assert found["bfloat16 loss"] < 2e-2 and found["bfloat16 gradient"] < 2e-2
    assert not any(value for name, value in found.items() if name.endswith(("hits", "without gradient")))


def test_a_stand_in_is_scaled_slot_by_slot(monkeypatch):
    """A stand-in with liger's interface, which scales all slots by one number."""

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
    hidden, head, labels = inputs()
    weights = torch.linspace(0.1, 2, 20)
    expected, right = head_cross_entropy(hidden, head, labels, 8)
    losses, correct = HEADS["liger"](hidden, head, labels, 8)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    slopes = [torch.autograd.grad((each * weights).sum(), hidden)[0] for each in (losses, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)
    assert torch.equal(correct, right) and head.grad is None
    with torch.no_grad():
        torch.testing.assert_close(HEADS["liger"](hidden, head, labels, 8)[0], expected, rtol=1e-6, atol=1e-6)


def test_where_it_cannot_run_it_is_refused(monkeypatch):
    with pytest.raises(DrafterError, match=r"drafter\.head = liger: its kernels need a CUDA device"):
        choose_head("liger", torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DrafterError, match=r"drafter.head = liger: the package is not installed; pip install"):
        choose_head("liger", torch.device("cuda"))
