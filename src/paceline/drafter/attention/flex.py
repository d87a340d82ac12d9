"""Block-sparse attention with torch's flex_attention: fast on CUDA; on the CPU forward only, as torch supports it.

Keys are [context; slots]. Every slot sees two ranges of them: a run of its document's context, and a run of its own
block. So the mask is four numbers a row, and the tiles that are empty, partial or full follow from them on the host.
Neighboring anchors see nearly the same context, so most tiles are full or empty.

Everything that changes from batch to batch is a tensor or a padded size, and sizes are dynamic: one graph serves all
layers and batches. A graph for each number of anchors would pass torch's limit of recompiles within a few batches, and
what torch does then needs the whole score matrix. Passing the limit is an error here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from paceline.drafter.attention.layout import Layout
from paceline.errors import DrafterError
from paceline.text import first_line

COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
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
    """Attention by flex_attention under a block mask; see the package for shapes.

    Raises:
        DrafterError: torch cannot compile it here, or would compile it anew again and again.
    """
    groups, anchors, slots, repeats, size = query.shape
    num_context, num_slots = padded_size(context_key.shape[1]), padded_size(anchors * slots)
    rows = query.permute(0, 3, 1, 2, 4).reshape(1, groups * repeats, anchors * slots, size)

    def joined(context: Tensor, block: Tensor) -> Tensor:
        """Padded context, then padded slots, [1, G, columns, E]."""
        return torch.cat([_padded(context, num_context), _padded(block.flatten(1, 2), num_slots)], dim=1)[None]

    keys, values = joined(context_key, block_key), joined(context_value, block_value)
    mask = block_mask(layout, window, causal, num_context, num_slots)
    output = _attend(_padded(rows, num_slots), keys, values, mask)
    return output[0, :, : anchors * slots].view(groups, repeats, anchors, slots, size).permute(0, 2, 3, 1, 4)


def padded_size(count: int) -> int:
    """The next of few sizes: multiples of a tile, in steps of an eighth of the power of two below; two tiles at least.

    A size of one tile would be a separate graph: torch never makes a size of 1 dynamic.
    """
    tiles = max(2, -(-count // TILE))
    step = max(1, 2 ** (tiles.bit_length() - 1) // 8)
    return -(-tiles // step) * step * TILE


def block_mask(layout: Layout, window: int | None, causal: bool, num_context: int, num_slots: int) -> BlockMask:
    """The rule of `dense.visible` for padded sizes. A padded slot sees itself; nothing else sees padding.

    Args:
        layout: real blocks and context.
        window, causal: of the layer.
        num_context, num_slots: padded columns of context, padded rows of slots; multiples of `TILE`.
    """
    key = (window, causal, num_context, num_slots)
    if key not in layout.masks:
        layout.masks[key] = _build(layout, window, causal, num_context, num_slots)
    mask = layout.masks[key]
    assert isinstance(mask, BlockMask)
    return mask


def _build(layout: Layout, window: int | None, causal: bool, num_context: int, num_slots: int) -> BlockMask:
    ranges = layout.ranges(window, causal)
    padding = np.arange(ranges.shape[1], num_slots)
    none = np.zeros_like(padding)
    ranges = np.concatenate([ranges, np.stack([none, none, padding, padding + 1])], axis=1)
    ranges[2:] += num_context
    touched, whole = _tiles(ranges, num_slots // TILE, (num_context + num_slots) // TILE)
    context_start, context_end, own_start, own_end = (layout.tensor(row.astype(np.int32)) for row in ranges)

    def rule(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Whether a slot sees a column."""
        in_context = (column >= context_start[row]) & (column < context_end[row])
        return in_context | ((column >= own_start[row]) & (column < own_end[row]))

    partial, full = _listed(touched & ~whole, layout), _listed(whole, layout)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=TILE, mask_mod=rule)


def _tiles(ranges: np.ndarray, num_rows: int, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tiles hold any visible pair and which hold nothing else, bool [num_rows, num_columns] each.

    Args:
        ranges: (start, end) of the context and of the own block, for each slot, in columns, [4, num_rows · TILE].
        num_rows, num_columns: tiles.
    """
    row = np.arange(ranges.shape[1]) // TILE * (num_columns + 1)
    touched = np.zeros((num_rows, num_columns + 1), np.int64)
    whole = np.zeros_like(touched)
    for start, end in (ranges[:2], ranges[2:]):
        _count_runs(touched, row, np.where(start < end, start // TILE, 0), np.where(start < end, -(-end // TILE), 0))
        first = -(-start // TILE)
        _count_runs(whole, row, first, np.maximum(first, end // TILE))
    return touched.cumsum(1)[:, :-1] > 0, whole.cumsum(1)[:, :-1] == TILE


def _count_runs(changes: np.ndarray, row: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
    """Adds 1 where a slot's run of tiles begins and -1 after it: running sums count the slots that see a tile."""
    size = changes.size
    counts = np.bincount(row + first, minlength=size) - np.bincount(row + last, minlength=size)
    changes += counts.reshape(changes.shape)


def _listed(tiles: np.ndarray, layout: Layout) -> tuple[Tensor, Tensor]:
    """Tiles as flex_attention reads them: how many a row has, [1, 1, rows], and which, [1, 1, rows, columns]."""
    counts = tiles.sum(1, dtype=np.int32)
    rows, columns = np.nonzero(tiles)
    listed = np.zeros(tiles.shape, np.int32)
    listed[rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]] = columns
    return layout.tensor(counts[None, None]), layout.tensor(listed[None, None])


def _padded(rows: Tensor, count: int) -> Tensor:
    """[..., rows, E] with rows of zeros up to `count`."""
    return F.pad(rows, (0, 0, 0, count - rows.shape[-2]))


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    if query.device.type != "cuda":
        output = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    else:
        output = compiled(query, key, value, mask)
    assert isinstance(output, Tensor)
    return output


def compiled(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """flex_attention, compiled once for all sizes.

    Raises:
        DrafterError: see `flex_attention_over_blocks`.
    """
    # The compiler takes seconds to import, and only cards need it.
    from torch._dynamo import config

    with compiler_errors(), config.patch(fail_on_recompile_limit_hit=True):
        output = _kernel()(query, key, value, block_mask=mask, enable_gqa=True)
    assert isinstance(output, Tensor)
    return output


@contextmanager
def compiler_errors() -> Generator[None]:
    """What torch's compilers raise inside, as one line with the way out; the backward pass is compiled when it runs.

    Raises:
        DrafterError: flex_attention cannot be compiled here.
    """
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(COMPILERS):
            raise
        raise DrafterError(
            f"drafter.attention: flex: torch {torch.__version__} cannot compile flex_attention here "
            f"({first_line(error)}); set drafter.attention to split"
        ) from error


@cache
def _kernel() -> Callable[..., Tensor | tuple[Tensor, ...]]:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
