"""Block-sparse attention with torch's flex_attention: fast on CUDA; on the CPU forward only, as torch supports it.

Keys are [context; blocks]. Sorted anchors make neighbouring queries see nearly the same context, so most tiles of the
mask are full or empty. Context and anchors are padded to few sizes, so that few kernels are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from paceline.drafter.attention.layout import Layout

TILE = 128
"""Rows and columns of a mask tile."""


def flex_attention_over_blocks(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    layout: Layout,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Attention by flex_attention under a block mask; see the package for shapes."""
    groups, anchors, slots, repeats, size = query.shape
    num_context = padded_size(context_key.shape[1])
    num_slots = padded_size(anchors * slots)
    rows = query.permute(0, 3, 1, 2, 4).reshape(1, groups * repeats, anchors * slots, size)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, num_slots - anchors * slots))

    def joined(context: Tensor, block: Tensor) -> Tensor:
        """Padded context, then padded slots, [1, G, columns, E]."""
        pad = torch.nn.functional.pad
        block = block.flatten(1, 2)
        parts = [
            pad(context, (0, 0, 0, num_context - context.shape[1])),
            pad(block, (0, 0, 0, num_slots - block.shape[1])),
        ]
        return torch.cat(parts, dim=1)[None]

    mask = block_mask(layout, window, causal, num_context, num_slots)
    output = _kernel(query.device.type)(
        rows, joined(context_key, block_key), joined(context_value, block_value), block_mask=mask, enable_gqa=True
    )
    assert isinstance(output, Tensor)
    output = output[0, :, : anchors * slots].view(groups, repeats, anchors, slots, size)
    return output.permute(0, 2, 3, 1, 4)


def padded_size(count: int) -> int:
    """The next of few sizes: multiples of a tile, in steps of an eighth of the power of two below."""
    tiles = max(1, -(-count // TILE))
    step = max(1, 2 ** (tiles.bit_length() - 1) // 8)
    return -(-tiles // step) * step * TILE


def block_mask(layout: Layout, window: int | None, causal: bool, num_context: int, num_slots: int) -> BlockMask:
    """The rule of `dense.visible` for padded sizes; padding sees and is seen by padding only.

    Args:
        layout: real blocks and context.
        window, causal: of the layer.
        num_context, num_slots: padded columns of context, padded rows of slots.
    """
    key = (window, causal, num_context, num_slots)
    if key not in layout.masks:
        layout.masks[key] = _build(layout, window, causal, num_context, num_slots)
    mask = layout.masks[key]
    assert isinstance(mask, BlockMask)
    return mask


def _build(layout: Layout, window: int | None, causal: bool, num_context: int, num_slots: int) -> BlockMask:
    device, slots = layout.device, layout.block_size

    def padded(values: Tensor, count: int, fill: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, count - len(values)), value=fill)

    block_of = torch.arange(num_slots, device=device) // slots
    # Padded slots see context [0, 0), that is, none; padded context lies behind all real context.
    starts = padded(layout.tensor(layout.starts).repeat_interleave(slots), num_slots, 0)
    ends = padded(layout.ends.repeat_interleave(slots), num_slots, 0)
    place = padded(layout.slot_positions.reshape(-1), num_slots, 0) + starts
    num_real = len(layout.anchors) * slots

    def rule(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Whether a slot sees a column."""
        is_context = column < num_context
        seen = is_context & (column >= starts[row]) & (column < ends[row])
        other = torch.where(is_context, 0, column - num_context)
        own = ~is_context & (block_of[row] == block_of[other]) & ((row < num_real) == (other < num_real))
        if causal:
            own = own & (other <= row)
        if window is not None:
            seen = seen & (place[row] - column < window)
            own = own & (row - other < window)
        return seen | own

    make = _compiled_builder() if device.type == "cuda" else create_block_mask
    return make(rule, None, None, num_slots, num_context + num_slots, device=device, BLOCK_SIZE=TILE)


@cache
def _compiled_builder() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask)


@cache
def _kernel(device: str) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
