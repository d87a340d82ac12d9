"""The terms of a loss: what is measured in a slot from the drafter's logits and, except cross entropy, the teacher's.

Shape letters: M slots, V vocabulary. Each term gives its loss per slot and the gradient by the drafter's logits.
p is the teacher's distribution, q the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Distributions:
    """Log-probabilities of some slots.

    Attributes:
        log_q: the drafter's, [M, V].
        log_p: the teacher's, [M, V]; None where no term needs it.
        labels: tokens, int64 [M].
    """

    log_q: Tensor
    log_p: Tensor | None
    labels: Tensor

    @property
    def teacher(self) -> Tensor:
        """log p, which the term needs."""
        assert self.log_p is not None
        return self.log_p


Term = Callable[[Distributions], tuple[Tensor, Tensor]]


def cross_entropy(of: Distributions) -> tuple[Tensor, Tensor]:
    """-log q[label]."""
    index = of.labels[:, None]
    slope = of.log_q.exp()
    slope.scatter_add_(1, index, torch.full_like(index, -1, dtype=slope.dtype))
    return -of.log_q.gather(1, index)[:, 0], slope


def forward_kl(of: Distributions) -> tuple[Tensor, Tensor]:
    """KL(p ‖ q) = Σ p·(log p - log q)."""
    p = of.teacher.exp()
    # A token that the teacher rules out (log p = -inf) adds nothing.
    return torch.where(p > 0, p * (of.teacher - of.log_q), 0.0).sum(1), of.log_q.exp() - p


def total_variation(of: Distributions) -> tuple[Tensor, Tensor]:
    """½ Σ |p - q| = 1 - Σ min(p, q): the chance that a sampled draft is rejected."""
    q = of.log_q.exp()
    difference = q - of.teacher.exp()
    sign = difference.sign() * 0.5
    return 0.5 * difference.abs().sum(1), q * (sign - (q * sign).sum(1, keepdim=True))


def likelihood_hybrid(of: Distributions) -> tuple[Tensor, Tensor]:
    """λ·KL + (1 - λ)·TV with λ = exp(-3·α), α = Σ min(p, q) held fixed [arXiv 2602.23881].

    KL where the two hardly overlap, TV where they nearly agree.
    """
    kl, kl_slope = forward_kl(of)
    tv, tv_slope = total_variation(of)
    share = torch.exp(-3 * (1 - tv))
    mixed = kl_slope * share[:, None] + tv_slope * (1 - share)[:, None]
    return share * kl + (1 - share) * tv, mixed


TERMS: dict[str, Term] = {
    "ce": cross_entropy,
    "kl": forward_kl,
    "tv": total_variation,
    "lk": likelihood_hybrid,
}
