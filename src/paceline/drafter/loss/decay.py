"""Weights that fall with the distance from the anchor: exp(-(k - 1) / γ) for draft k ≥ 1 [arXiv 2602.06036, app. A]."""

from __future__ import annotations

import torch
from torch import Tensor


def decay_weights(cross_entropy: Tensor, live: Tensor, gamma: float, alpha: float) -> Tensor:
    """exp(-(k - 1) / γ) on live drafts; see the package for shapes. Does not depend on the losses or on α."""
    drafts = torch.arange(live.shape[1], device=live.device, dtype=cross_entropy.dtype)
    return torch.exp(-drafts / gamma) * live


def default_gamma(block_size: int) -> float:
    """7, 5, 4 for blocks of 16, 10, 8 as published; in proportion between and beyond (slope of the nearest pair)."""
    known = {8: 4.0, 10: 5.0, 16: 7.0}
    if block_size in known:
        return known[block_size]
    if block_size < 10:
        return block_size / 2
    return 5.0 + (block_size - 10) / 3
