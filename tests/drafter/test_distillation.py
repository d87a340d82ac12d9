"""Terms against a teacher: values by their definitions, gradients by autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from paceline.drafter.loss.distillation import distillation_loss


def plain(name: str, logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    p, q = torch.softmax(teacher, 1), torch.softmax(logits, 1)
    kl, tv = (p * (p.log() - q.log())).sum(1), 1 - torch.minimum(p, q).sum(1)
    if name == "lk":
        share = torch.exp(-3 * torch.minimum(p, q).sum(1)).detach()
        return share * kl + (1 - share) * tv
    return {"ce": F.cross_entropy(logits, labels, reduction="none"), "kl": kl, "tv": tv}[name]


@pytest.mark.parametrize(
    "shares", [{"ce": 1.0}, {"kl": 1.0}, {"tv": 1.0}, {"lk": 1.0}, {"ce": 0.1, "tv": 0.9, "kl": 2.0}]
)
@pytest.mark.parametrize("chunk", [3, 100])
def test_mixtures_equal_plain_logits(shares, chunk):
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    hidden, head, own, last = make(11, 6).requires_grad_(), make(40, 6), make(40, 5), make(11, 5)
    labels = np.random.default_rng(0).integers(0, 40, 11)
    logits = hidden @ head.T
    tokens = torch.from_numpy(labels)
    reference = sum(s * plain(n, logits, last @ own.T, tokens) for n, s in shares.items())
    weights = torch.linspace(0.1, 3, 11, dtype=torch.float64)
    (expected,) = torch.autograd.grad((reference * weights).sum(), hidden)
    found = distillation_loss(hidden, head, labels, shares, lambda rows: rows @ own.T, last, chunk)
    (gradient,) = torch.autograd.grad((found.loss * weights).sum(), hidden)
    torch.testing.assert_close(found.loss, reference)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(found.cross_entropy, F.cross_entropy(logits, tokens, reduction="none").detach())
    assert torch.equal(found.correct, logits.argmax(1) == tokens)
    for name, values in found.terms.items():
        torch.testing.assert_close(values, plain(name, logits, last @ own.T, tokens).detach())
