"""Whether documents that share a row see one another: the others are changed, and a document must not notice.

Comparing a document in a row with the same document alone is not enough in 16 bits: rounding differs, and a state that
runs on into a few tokens of the next document hides in it. Here both runs have the same shapes, so that most models
compute the very same numbers for what is not changed. Where they do not (the experts of a mixture get other tokens
beside), the first document of the row, which nothing can leak into, shows how large that noise is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.target_model.model import TargetModel

EXACT = 1e-6
"""Relative difference up to which two runs of the same shapes count as the same."""
NOISE = 4.0
"""How many times the noise of the first document is still noise in the others."""


@torch.no_grad()
def leaks(target: TargetModel, ids: Tensor, lengths: Sequence[int] | np.ndarray) -> list[float]:
    """How far documents of a packed row follow a change of the documents before them, for each tap.

    Every other document is changed, then the rest. Without noise the largest difference of an unchanged token counts.
    With noise the median over documents of the difference of their first tokens does, for whatever runs on from the
    document before reaches these first, and a router may send a single token elsewhere.

    Args:
        target: loaded with `packed` set.
        ids: right-padded documents, int64 [B, W], B > 1.
        lengths: real tokens of each.

    Returns:
        Relative differences; 0 where they are no larger than the noise.
    """
    lengths = np.asarray(lengths)
    rows, starts = target.structure.embedding.weight.shape[0], np.concatenate([[0], np.cumsum(lengths)[:-1]])
    plain, _ = target.tap_rows(ids, lengths)
    document = torch.as_tensor(np.repeat(np.arange(len(lengths)), lengths), device=plain.device)
    firsts, all_of, noise = [], [], None
    for odd in (False, True):
        changed = ids.clone()
        changed[int(odd) :: 2] = (changed[int(odd) :: 2] + rows // 2) % rows
        difference = _relative(plain, target.tap_rows(changed, lengths)[0], len(target.taps))
        kept = [place for place in range(1, len(lengths)) if (place % 2 == 1) != odd]
        if odd:
            noise = difference[document == 0].amax(dim=0)
        if kept:
            firsts.append(difference[torch.as_tensor(starts[kept], device=plain.device)])
            all_of.append(difference[torch.isin(document, torch.as_tensor(kept, device=plain.device))].amax(dim=0))
    assert noise is not None, "the loop ends with it"
    largest, median = torch.stack(all_of).amax(dim=0), torch.cat(firsts).median(dim=0).values
    found = []
    for floor, of_all, of_first in zip(noise.tolist(), largest.tolist(), median.tolist(), strict=True):
        seen, allowed = (of_all, EXACT) if floor <= EXACT else (of_first, NOISE * floor)
        found.append(0.0 if seen <= allowed else seen)
    return found


def _relative(one: Tensor, other: Tensor, num_taps: int) -> Tensor:
    """Relative difference of every token's states, [S, N]."""
    one, other = (states.double().reshape(len(states), num_taps, -1) for states in (one, other))
    return (one - other).norm(dim=2) / one.norm(dim=2).clamp_min(1e-30)
