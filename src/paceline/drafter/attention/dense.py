"""The reference: one explicit mask over context and blocks, plain softmax. Slow and large; read it to know the rule."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.drafter.attention.layout import Layout


def visible(layout: Layout, window: int | None, causal: bool) -> Tensor:
    """Which keys every slot sees.

    A block of anchor a sees the context of its document strictly before a, and its own slots (only itself and earlier
    ones if causal). A window counts from the query: position p sees position q iff p - q < window.

    Returns:
        bool [A·K, S + A·K]; context columns first.
    """
    slot = layout.slot_positions.reshape(-1)
    block = torch.arange(len(layout.anchors), device=layout.device).repeat_interleave(layout.block_size)
    document = layout.tensor(layout.documents)[block]
    anchor = layout.tensor(layout.anchors)[block]
    context = layout.tensor(layout.context_positions)
    same_document = document[:, None] == layout.tensor(layout.context_documents)[None, :]
    sees_context = same_document & (context[None, :] < anchor[:, None])
    sees_slots = block[:, None] == block[None, :]
    if causal:
        sees_slots &= slot[None, :] <= slot[:, None]
    if window is not None:
        sees_context &= slot[:, None] - context[None, :] < window
        sees_slots &= slot[:, None] - slot[None, :] < window
    return torch.cat([sees_context, sees_slots], dim=1)


def dense_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    layout: Layout,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Attention with an explicit [A·K, S + A·K] mask; see the package for shapes."""
    groups, anchors, slots, repeats, size = query.shape
    rows = query.transpose(2, 3).transpose(1, 2).reshape(groups, repeats, anchors * slots, size)
    key = torch.cat([context_key, block_key.flatten(1, 2)], dim=1)
    value = torch.cat([context_value, block_value.flatten(1, 2)], dim=1)
    scores = rows @ key[:, None].transpose(-1, -2) * size**-0.5
    scores = scores.masked_fill(~visible(layout, window, causal), float("-inf"))
    output = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    output = output @ value[:, None]
    return output.view(groups, repeats, anchors, slots, size).permute(0, 2, 3, 1, 4)
