"""D-PACE: weights from the drafter's own chance to get that far [arXiv 2605.18810]."""

from __future__ import annotations

import torch
from torch import Tensor


def dpace_weights(cross_entropy: Tensor, live: Tensor, gamma: float, alpha: float) -> Tensor:
    """w_j = Σ_{m ≥ j} C_m with C_j = Π_{i ≤ j} ((1 - α)·q_i + α) and q_i = exp(-CE_i); see the package for shapes.

    A draft that is not live is 1 in the product and 0 in the sum. γ is not used.
    """
    smooth = (1 - alpha) * torch.exp(-cross_entropy) + alpha
    reach = torch.cumprod(torch.where(live, smooth, torch.ones_like(smooth)), dim=1) * live
    return reach.flip(1).cumsum(1).flip(1) * live
