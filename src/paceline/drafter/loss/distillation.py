"""The frozen head with a weighted sum of terms, some against the target's own distributions.

Logits of drafter and teacher exist whole for one chunk of slots at a time (total variation needs both normalized, so
tiles of the vocabulary are not enough); the gradient by the hidden states is made in the same pass, as in `tiled_ce`.

Shape letters: M slots, D hidden, H the target's hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.device import to_device
from paceline.drafter.layers import accumulation_dtype, rows_at_once
from paceline.drafter.loss.terms import TERMS, Distributions

Teacher = Callable[[Tensor], Tensor]
"""Input of the target's final norm [m, H] → the target's logits [m, V]: its own norm, head and scaling."""


@dataclass(frozen=True, slots=True)
class SlotLosses:
    """Per slot, [M].

    Attributes:
        loss: weighted sum of the terms, differentiable by the hidden states.
        cross_entropy: of the labels, detached.
        correct: whether the label is the first largest logit.
        terms: each term by name, detached.
    """

    loss: Tensor
    cross_entropy: Tensor
    correct: Tensor
    terms: Mapping[str, Tensor]


def distillation_loss(
    hidden: Tensor,
    head: Tensor,
    labels: np.ndarray,
    shares: Mapping[str, float],
    teacher: Teacher | None,
    teacher_hidden: Tensor | None,
    chunk: int,
) -> SlotLosses:
    """Weighted sum of terms, slot by slot.

    Args:
        hidden: [M, D].
        head: frozen, [V, D], same type as hidden.
        labels: token per slot, on the host, int64 [M].
        shares: weight by term name; all of them known to `TERMS`.
        teacher: makes the target's logits, where a term needs them.
        teacher_hidden: what the teacher reads for each slot, [M, H].
        chunk: slots whose logits exist at once, at most.
    """
    names = tuple(shares)
    loss, cross_entropy, correct, *terms = _Distillation.apply(
        hidden, head, labels, tuple(shares.values()), names, teacher, teacher_hidden, chunk
    )
    return SlotLosses(loss, cross_entropy, correct, dict(zip(names, terms, strict=True)))


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: np.ndarray,
        shares: tuple[float, ...],
        names: tuple[str, ...],
        teacher: Teacher | None,
        teacher_hidden: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, ...]:
        """Loss, cross entropy, hits and each term, all [M]; the gradient is made on the way."""
        count, kind = hidden.shape[0], accumulation_dtype(hidden.dtype)
        columns = hidden.new_empty(len(names) + 2, count, dtype=kind)
        correct = torch.empty(count, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden)
        chunk = rows_at_once(chunk, head.shape[0])
        tokens = to_device(labels, hidden.device)
        for begin in range(0, count, chunk):
            part = slice(begin, min(begin + chunk, count))
            logits = (hidden[part] @ head.T).to(kind)
            correct[part] = logits.argmax(1) == tokens[part]
            log_p = None
            if teacher is not None and teacher_hidden is not None:
                log_p = torch.log_softmax(teacher(teacher_hidden[part]).to(kind), dim=1)
            of = Distributions(torch.log_softmax(logits, dim=1), log_p, tokens[part])
            slope = torch.zeros_like(logits)
            total = torch.zeros(logits.shape[0], dtype=kind, device=hidden.device)
            for row, (name, share) in enumerate(zip(names, shares, strict=True)):
                value, by_logits = TERMS[name](of)
                columns[row + 2, part] = value
                total.add_(value, alpha=share)
                slope.add_(by_logits, alpha=share)
            columns[0, part] = total
            columns[1, part] = -of.log_q.gather(1, tokens[part][:, None])[:, 0]
            gradient[part] = slope.to(hidden.dtype) @ head
        ctx.save_for_backward(gradient)
        outputs = (columns[0], columns[1], correct, *columns[2:])
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Each slot's own gradient, made in the forward pass, times that of its loss."""
        (slope,) = ctx.saved_tensors
        return ((slope * gradients[0][:, None]).to(slope.dtype), *[None] * 7)
