"""The head by torch's own `linear_cross_entropy`, which torch 2.9 does not have yet.

It tells no predictions, so that logits are made once more for them; and it makes them again in the backward pass.

Shape letters: M slots, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.drafter.layers import rows_at_once
from paceline.errors import DrafterError


def require() -> None:
    """Refuses in words where this torch has no such function.

    Raises:
        DrafterError: it has none.
    """
    if not (hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")):
        raise DrafterError(
            f"drafter.head = torch: torch {torch.__version__} has no chunked torch.nn.functional.linear_cross_entropy; "
            "use own, or a newer torch"
        )


def head_cross_entropy(hidden: Tensor, head: Tensor, labels: np.ndarray, chunk: int) -> tuple[Tensor, Tensor]:
    """Cross entropy and hits, slot by slot; see the package."""
    functional: Any = F
    neural: Any = torch.nn
    head = head.detach()
    tokens = torch.from_numpy(np.ascontiguousarray(labels)).to(hidden.device, non_blocking=True)
    rows = rows_at_once(chunk, head.shape[0])
    options = neural.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=rows, acc_policy="accurate")
    losses = functional.linear_cross_entropy(hidden, head, tokens, reduction="none", options=options)
    with torch.no_grad():
        parts = zip(hidden.split(rows), tokens.split(rows), strict=True)
        hits = [(part @ head.T).argmax(1) == wanted for part, wanted in parts]
    return losses, torch.cat(hits)
