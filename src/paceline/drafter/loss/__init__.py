"""The loss: the frozen head with cross entropy or with terms against the target, and the weights of slots.

In: hidden states of supervised slots [M, D], the frozen head [V, D], labels. Out: losses per slot, differentiable by
the hidden states. Which slots are supervised is decided in `block_inputs`; what is divided by what, in the learner.

`HEADS` are the backends of head and cross entropy, with one signature: hidden states [M, D], frozen head [V, D] of the
same type, labels on the host int64 [M], and the slots whose logits may exist at once → (cross entropy [M], float32 or
wider; whether the label is the first largest logit, bool [M]). The head gets no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paceline.drafter.loss import liger_ce, tiled_ce

Head = Callable[[Tensor, Tensor, np.ndarray, int], tuple[Tensor, Tensor]]

HEADS: dict[str, Head] = {
    "tiled": tiled_ce.head_cross_entropy,
    "liger": liger_ce.head_cross_entropy,
}


def choose_head(name: str, device: torch.device) -> Head:
    """The backend of that name.

    Raises:
        DrafterError: it cannot run here: the package is missing, or the device is not for it.
    """
    if name == "liger":
        liger_ce.require(device)
    return HEADS[name]
