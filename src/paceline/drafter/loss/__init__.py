"""Backends of the frozen head with cross entropy.

One signature for all, with M slots, D hidden, V vocabulary: hidden states [M, D], frozen head [V, D] of the same type,
labels on the host int64 [M], and the slots whose logits may exist at once → (cross entropy [M], float32 or wider,
differentiable by the hidden states; whether the label is the first largest logit, bool [M]). The head gets no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paceline.drafter.loss import liger_ce, tiled_ce, torch_ce

Head = Callable[[Tensor, Tensor, np.ndarray, int], tuple[Tensor, Tensor]]

HEADS: dict[str, Head] = {
    "own": tiled_ce.head_cross_entropy,
    "torch": torch_ce.head_cross_entropy,
    "liger": liger_ce.head_cross_entropy,
}


def choose_head(name: str, device: torch.device) -> Head:
    """The backend of that name.

    Raises:
        DrafterError: it cannot run here: the library lacks it, or the device is not for it.
    """
    if name == "torch":
        torch_ce.require()
    elif name == "liger":
        liger_ce.require(device)
    return HEADS[name]
