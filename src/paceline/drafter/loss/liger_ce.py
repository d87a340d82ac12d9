"""The head by liger-kernel's fused linear cross entropy, a Triton kernel for CUDA.

Shape letters: M slots, D hidden, V vocabulary.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.device import to_device
from paceline.errors import DrafterError

MODULE = "liger_kernel.transformers.fused_linear_cross_entropy"


def require(device: torch.device) -> None:
    """Refuse where the kernel cannot run.

    Raises:
        DrafterError: no CUDA device, or the package is missing.
    """
    if device.type != "cuda":
        raise DrafterError(
            f"drafter.head = liger: its kernels need a CUDA device, and the drafter is on {device}; use tiled"
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise DrafterError(
            "drafter.head = liger: the package is not installed; pip install 'paceline[liger]', or use tiled"
        )


def head_cross_entropy(hidden: Tensor, head: Tensor, labels: np.ndarray, chunk: int) -> tuple[Tensor, Tensor]:
    """Cross entropy and hits, slot by slot; see the package. The kernel chooses its own chunks."""
    tokens = to_device(labels, hidden.device)
    losses, hits = _Fused.apply(hidden, head.detach(), tokens)
    return losses, hits


class _Fused(torch.autograd.Function):
    """Gathers each slot's own gradient in the forward pass: the kernel scales all slots by one number only."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and hits [M]."""
        make = importlib.import_module(MODULE).LigerFusedLinearCrossEntropyLoss
        slope = None
        with torch.set_grad_enabled(ctx.needs_input_grad[0]):
            leaf = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
            found = make(reduction="none", return_predicted_tokens=True)(head, leaf, tokens)
            if ctx.needs_input_grad[0]:
                (slope,) = torch.autograd.grad(found.loss, leaf, torch.ones_like(found.loss))
        hits = found.predicted_tokens == tokens
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(hits)
        return found.loss.detach().float(), hits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        """Each slot's own gradient, made in the forward pass, times that of its loss."""
        (slope,) = ctx.saved_tensors
        return (slope * gradients[0][:, None]).to(slope.dtype), None, None
