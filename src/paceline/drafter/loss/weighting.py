"""What counts equally over a window: every supervised draft, every anchor, or every sample.

All three give a sum of weighted losses and a sum of weights; both add up over micro-batches, drafter replicas and
splits, and are divided once. Samples are never split, so each normaliser below is known where it is used.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weigh(weights: Tensor, documents: Tensor, num_documents: int, weighting: str) -> Tensor:
    """Slot weights under a weighting.

    - ``token``: w as it is; the window's loss is Σ w·loss / Σ w over all supervised drafts.
    - ``anchor``: w / Σ w of its block; each anchor with a supervised draft counts 1, shared among its drafts by w.
    - ``sample``: w / Σ w of its document; each sample with a supervised draft counts 1, shared likewise.

    Args:
        weights: non-negative, zero where not live, [A, J].
        documents: document of each anchor, int64 [A].
        num_documents: documents of the batch.
        weighting: token, anchor or sample.

    Returns:
        [A, J].
    """
    if weighting == "token":
        return weights
    total = weights.sum(1)
    if weighting == "sample":
        total = torch.zeros(num_documents, dtype=total.dtype, device=total.device).index_add_(0, documents, total)
        total = total[documents]
    return weights / torch.where(total > 0, total, torch.ones_like(total))[:, None]
