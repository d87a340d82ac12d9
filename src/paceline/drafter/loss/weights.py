"""How much each draft counts: slot weights by objective name, and what counts equally over a window.

Shape letters: B documents, A anchors, J drafts of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SlotWeights = Callable[[Tensor, Tensor, float, float], Tensor]
"""(detached cross entropies [A, J], live mask bool [A, J], γ, α) → weights [A, J] ≥ 0, zero where not live."""


def decay_weights(cross_entropy: Tensor, live: Tensor, gamma: float, alpha: float) -> Tensor:
    """exp(-(k - 1) / γ) for draft k ≥ 1 [arXiv 2602.06036, app. A]. Does not depend on the losses or on α."""
    drafts = torch.arange(live.shape[1], device=live.device, dtype=cross_entropy.dtype)
    return torch.exp(-drafts / gamma) * live


def dpace_weights(cross_entropy: Tensor, live: Tensor, gamma: float, alpha: float) -> Tensor:
    """D-PACE: weights from the drafter's own chance to get that far [arXiv 2605.18810].

    w_j = Σ_{m ≥ j} C_m with C_j = Π_{i ≤ j} ((1 - α)·q_i + α) and q_i = exp(-CE_i). A draft that is not live is 1 in
    the product and 0 in the sum. γ is not used.
    """
    smooth = (1 - alpha) * torch.exp(-cross_entropy) + alpha
    reach = torch.cumprod(torch.where(live, smooth, torch.ones_like(smooth)), dim=1) * live
    # Sums over later drafts by a triangle: a float cumsum is not deterministic on CUDA.
    later = torch.ones(live.shape[1], live.shape[1], dtype=reach.dtype, device=reach.device).tril()
    return (reach[:, :, None] * later).sum(1) * live


SLOT_WEIGHTS: dict[str, SlotWeights] = {"decay": decay_weights, "dpace": dpace_weights}


def default_gamma(block_size: int) -> float:
    """7, 5, 4 for blocks of 16, 10, 8 as published; in proportion between and beyond (slope of the nearest pair)."""
    known = {8: 4.0, 10: 5.0, 16: 7.0}
    if block_size in known:
        return known[block_size]
    if block_size < 10:
        return block_size / 2
    return 5.0 + (block_size - 10) / 3


def normalize_weights(weights: Tensor, anchor_counts: Tensor, weighting: str) -> Tensor:
    """Slot weights under a weighting.

    All three give a sum of weighted losses and a sum of weights; both add up over micro-batches, ranks and parts of a
    batch, and are divided once. Samples are never split, so each normalizer is known where it is used.

    - ``token``: w as it is; the window's loss is Σ w·loss / Σ w over all supervised drafts.
    - ``anchor``: w / Σ w of its block; each anchor with a supervised draft counts 1, shared among its drafts by w.
    - ``sample``: w / Σ w of its document; each sample with a supervised draft counts 1, shared likewise.

    Args:
        weights: non-negative, zero where not live, [A, J].
        anchor_counts: anchors of each document, int64 [B]; sums to A.
        weighting: token, anchor or sample.

    Returns:
        [A, J].
    """
    if weighting == "token":
        return weights
    total = weights.sum(1)
    if weighting == "sample":
        total = sum_by_document(total, anchor_counts).repeat_interleave(anchor_counts, output_size=len(total))
    return weights / torch.where(total > 0, total, torch.ones_like(total))[:, None]


def sum_by_document(values: Tensor, anchor_counts: Tensor) -> Tensor:
    """Sums of neighboring anchors [A, ...] by document, [B, ...]; always in the same order, on CUDA too."""
    return torch.segment_reduce(values, "sum", lengths=anchor_counts, axis=0, unsafe=True)
