"""One block a sequence, as in decoding: contexts of equal room side by side, one call of torch, no gradient.

Shape letters: as in the package; S = A · room columns of context.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.drafter.attention.layout import Layout


def decode_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    layout: Layout,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Attention where every document has one anchor and as many columns as the others; see the package for shapes."""
    groups, rows, slots, repeats, size = query.shape
    room = layout.num_context // rows
    end = int(layout.anchors.max())
    start = 0 if window is None else max(0, int(layout.anchors.min()) - window + 1)

    def joined(context: Tensor, block: Tensor) -> Tensor:
        """The columns of each row that its slots may see, then the slots, [A, G, columns, E]."""
        seen = context.view(groups, rows, room, size)[:, :, start:end]
        return torch.cat([seen, block], dim=2).transpose(0, 1)

    mask = _mask(layout, window, causal, start, end)
    if mask is not None:
        mask = mask.repeat_interleave(repeats, dim=1)[:, None]
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1).reshape(rows, groups, slots * repeats, size),
        joined(context_key, block_key),
        joined(context_value, block_value),
        attn_mask=mask,
    )
    return output.view(rows, groups, slots, repeats, size).transpose(0, 1)


def _mask(layout: Layout, window: int | None, causal: bool, start: int, end: int) -> Tensor | None:
    """Columns `start` to `end` of each context, then the block's slots: True where a slot sees them, [A, K, ...].

    None where all see all.
    """
    if (
        not causal
        and int(layout.anchors.min()) == end
        and (window is None or end + layout.block_size - start <= window)
    ):
        return None
    key = ("rows", window, causal)
    if key not in layout.masks:
        slots = layout.slot_positions
        context = torch.arange(start, end, device=layout.device).expand(len(slots), -1)
        keys = torch.cat([context, slots], dim=1)[:, None]
        seen = torch.ones(*slots.shape, keys.shape[-1], dtype=torch.bool, device=layout.device)
        seen[..., : end - start] = context[:, None] < slots[:, :1, None]
        if causal:
            seen[..., end - start :] = slots[:, None] <= slots[..., None]
        if window is not None:
            seen &= slots[..., None] - keys < window
        layout.masks[key] = seen
    return layout.masks[key]
