"""The frozen head with cross entropy: logits exist for one tile of slots × vocabulary at a time.

Running maxima and sums over vocabulary tiles, as in flash attention; the gradient by the hidden states,
softmax(logits) @ head - head[label], is gathered in the same pass, so that the backward pass only scales it. The head
gets no gradient. Memory does not grow with the number of slots beyond that gradient, nor with the vocabulary.

Shape letters: M slots, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.device import to_device
from paceline.drafter.layers import accumulation_dtype

VOCABULARY_TILE = {"cpu": 1024, "cuda": 32768}
"""Vocabulary rows of one tile. 2048 × 1024 float32 logits are 8 MiB: measured fastest on a CPU with 2 MiB of cache."""


def head_cross_entropy(hidden: Tensor, head: Tensor, labels: np.ndarray, chunk: int) -> tuple[Tensor, Tensor]:
    """Cross entropy of labels under softmax(hidden @ head.T), slot by slot.

    Args:
        hidden: [M, D].
        head: frozen, [V, D], same type as hidden.
        labels: token per slot, on the host, int64 [M].
        chunk: slots whose logits exist at once, at most.

    Returns:
        (cross entropy [M], float32, differentiable by hidden; whether the label is the first largest logit, bool [M]).
    """
    loss, correct = _HeadCrossEntropy.apply(hidden, head, labels, chunk)
    return loss, correct


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: np.ndarray, chunk: int) -> tuple[Tensor, Tensor]:
        """Losses and hits [M]; the gradient is made on the way, chunk by chunk."""
        count, kind = hidden.shape[0], accumulation_dtype(hidden.dtype)
        loss = torch.empty(count, dtype=kind, device=hidden.device)
        correct = torch.empty(count, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for begin in range(0, count, chunk):
            part = slice(begin, min(begin + chunk, count))
            ce, hit, slope = _chunk(hidden[part], head, labels[part], gradient is not None)
            loss[part], correct[part] = ce, hit
            if gradient is not None and slope is not None:
                gradient[part] = slope
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Each slot's kept gradient, scaled."""
        (slope,) = ctx.saved_tensors
        return (slope * gradients[0][:, None]).to(slope.dtype), None, None, None


def _chunk(
    hidden: Tensor, head: Tensor, labels: np.ndarray, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(cross entropy, correct, gradient by hidden or None) of a few slots."""
    count, kind, device = hidden.shape[0], accumulation_dtype(hidden.dtype), hidden.device
    tile = VOCABULARY_TILE.get(device.type, 32768)
    # Slots by label: those whose label is in a tile are a run, known on the host.
    order = np.argsort(labels, kind="stable")
    edges = np.searchsorted(labels[order], np.arange(0, head.shape[0] + tile, tile))
    slots, sorted_labels = to_device(order, device), to_device(labels[order], device)
    largest = torch.full((count, 1), float("-inf"), dtype=kind, device=device)
    total = torch.zeros(count, 1, dtype=kind, device=device)
    logit = torch.empty(count, dtype=kind, device=device)
    leads = torch.empty(count, dtype=torch.bool, device=device)
    summed = torch.zeros(count, head.shape[1], dtype=kind, device=device) if with_gradient else None
    # Buffers are reused: on a CPU, fresh memory costs more than the arithmetic.
    size = count * min(tile, head.shape[0])
    raw = torch.empty(size, dtype=hidden.dtype, device=device)
    same = kind == hidden.dtype
    broad = raw if same else torch.empty(size, dtype=kind, device=device)
    product = None if same else (torch.empty_like(hidden), torch.empty(hidden.shape, dtype=kind, device=device))
    for number, begin in enumerate(range(0, head.shape[0], tile)):
        rows = head[begin : begin + tile]
        narrow = torch.mm(hidden, rows.T, out=raw[: count * len(rows)].view(count, len(rows)))
        scores = narrow if same else broad[: count * len(rows)].view(count, len(rows)).copy_(narrow)
        here = slice(int(edges[number]), int(edges[number + 1]))
        if here.stop > here.start:
            chosen, local = slots[here], sorted_labels[here] - begin
            own = scores[chosen]
            best, where = own.max(dim=1)
            logit[chosen] = own.gather(1, local[:, None])[:, 0]
            leads[chosen] = (where == local) & (best > largest[chosen, 0])
        new_largest = torch.maximum(largest, scores.amax(dim=1, keepdim=True))
        shrink = (largest - new_largest).exp_()
        scores.sub_(new_largest).exp_()
        total.mul_(shrink).add_(scores.sum(dim=1, keepdim=True))
        if summed is not None:
            summed.mul_(shrink)
            if product is None:
                summed.addmm_(scores, rows)
            else:
                # Adding a narrow tensor to a wide one is several times slower than widening it first.
                summed.add_(product[1].copy_(torch.mm(narrow.copy_(scores), rows, out=product[0])))
        largest = new_largest
    correct = leads & (logit == largest[:, 0])
    if summed is not None:
        summed.div_(total)
        summed[slots] -= head[sorted_labels].to(kind)
    return total.log_().add_(largest)[:, 0].sub_(logit), correct, summed
