"""Context scores and own-block scores under one softmax, for groups of neighbouring anchors.

A group of anchors of one document reads only the context before its last anchor (and inside its window), so the work
is that of the visible pairs plus the span of a group; scores live for one group only, and nothing of the size
slots × (context + slots) ever exists. The backward pass computes the probabilities of a group anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.drafter.attention.layout import Layout

SLOTS_AT_ONCE = {"cpu": 128, "cuda": 4096}
"""Slots of a group: large enough for matrix products; on a CPU small enough that scores stay in the cache, on a card
large enough that starting kernels does not take longer than they run (a group is about 60 of them)."""

HALF_WIDTHS = 64
"""On a CPU, 16-bit contexts have widths in multiples of this: oneDNN builds and keeps a kernel for every shape it meets
in these types, a millisecond and a few KiB each."""

Group = tuple[int, int, int, int]


def split_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    layout: Layout,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Attention by groups of anchors; see the package for shapes."""
    multiple = width_multiple(query)
    # Rows of zeros behind the context, so that the last widths can be rounded up as well.
    key, value = (F.pad(tensor, (0, 0, 0, multiple - 1)) for tensor in (context_key, context_value))
    contiguous = [tensor.contiguous() for tensor in (query, key, value, block_key, block_value)]
    groups = layout.groups(window, SLOTS_AT_ONCE[layout.device.type], multiple)
    output = _SplitAttention.apply(*contiguous, layout, groups, window, causal)
    assert isinstance(output, Tensor)
    return output


def width_multiple(query: Tensor) -> int:
    """What the widths of contexts are rounded up to."""
    return HALF_WIDTHS if query.device.type == "cpu" and query.element_size() == 2 else 1


class _SplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        block_key: Tensor,
        block_value: Tensor,
        layout: Layout,
        groups: list[Group],
        window: int | None,
        causal: bool,
    ) -> Tensor:
        """Output [G, A, K, R, E]; keeps no weights, the backward pass makes them again."""
        output = torch.empty_like(query)
        hidden = layout.block_mask(window, causal)
        for group in groups:
            first, last, low, high = group
            width = high - low
            weights = _weights(query, context_key, block_key, group, layout, window, hidden)
            rows = output[:, first:last].flatten(1, 3)
            own = _by_block(weights[..., width:], last - first) @ block_value[:, first:last].flatten(0, 1)
            own = own.view(rows.shape)
            torch.baddbmm(own, weights[..., :width], context_value[:, low:high], out=rows)
        ctx.save_for_backward(query, context_key, context_value, block_key, block_value, output)
        ctx.layout, ctx.groups, ctx.window, ctx.causal = layout, groups, window, causal
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys and values of context and blocks."""
        query, context_key, context_value, block_key, block_value, output = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        layout, window = ctx.layout, ctx.window
        hidden = layout.block_mask(window, ctx.causal)
        scale = query.shape[-1] ** -0.5
        d_query, d_block_key, d_block_value = map(torch.empty_like, (query, block_key, block_value))
        # Several groups add to the same context rows.
        d_context_key, d_context_value = torch.zeros_like(context_key), torch.zeros_like(context_value)
        for group in ctx.groups:
            first, last, low, high = group
            width, count = high - low, last - first
            weights = _weights(query, context_key, block_key, group, layout, window, hidden)
            rows, d_out = query[:, first:last].flatten(1, 3), gradient[:, first:last].flatten(1, 3)
            mean = (d_out * output[:, first:last].flatten(1, 3)).sum(-1, keepdim=True)
            d_scores = torch.empty_like(weights)
            torch.bmm(d_out, context_value[:, low:high].transpose(1, 2), out=d_scores[..., :width])
            own = _by_block(d_out, count) @ block_value[:, first:last].flatten(0, 1).transpose(1, 2)
            d_scores[..., width:] = own.view(*d_scores.shape[:2], -1)
            d_scores.sub_(mean).mul_(weights)
            d_rows, d_own = d_query[:, first:last].flatten(1, 3), _by_block(d_scores[..., width:], count)
            own = (d_own @ block_key[:, first:last].flatten(0, 1)).view(d_rows.shape)
            torch.baddbmm(own, d_scores[..., :width], context_key[:, low:high], beta=scale, alpha=scale, out=d_rows)
            d_context_key[:, low:high].baddbmm_(d_scores[..., :width].transpose(1, 2), rows, alpha=scale)
            d_context_value[:, low:high].baddbmm_(weights[..., :width].transpose(1, 2), d_out)
            d_block_key[:, first:last] = ((d_own.transpose(1, 2) @ _by_block(rows, count)) * scale).view(
                d_block_key[:, first:last].shape
            )
            d_block_value[:, first:last] = (
                _by_block(weights[..., width:], count).transpose(1, 2) @ _by_block(d_out, count)
            ).view(d_block_value[:, first:last].shape)
        return d_query, d_context_key, d_context_value, d_block_key, d_block_value, None, None, None, None


def _by_block(rows: Tensor, count: int) -> Tensor:
    """[G, blocks·K·R, X] → [G·blocks, K·R, X], without a copy where strides allow."""
    return rows.reshape(rows.shape[0] * count, rows.shape[1] // count, rows.shape[2])


def _weights(
    query: Tensor,
    context_key: Tensor,
    block_key: Tensor,
    group: Group,
    layout: Layout,
    window: int | None,
    hidden: Tensor | None,
) -> Tensor:
    """Probabilities of a group over its context and the slots of each own block, [G, blocks·K·R, context + K]."""
    first, last, low, high = group
    groups, _, slots, repeats, size = query.shape
    width, count = high - low, last - first
    rows = query[:, first:last].flatten(1, 3)
    scores = query.new_empty(groups, count * slots * repeats, width + slots)
    scale = size**-0.5
    torch.baddbmm(
        scores[..., :width],
        rows,
        context_key[:, low:high].transpose(1, 2),
        beta=0,
        alpha=scale,
        out=scores[..., :width],
    )
    own = _by_block(rows, count) @ block_key[:, first:last].flatten(0, 1).transpose(1, 2)
    own = own.view(groups, count, slots, repeats, slots).mul_(scale)
    if hidden is not None:
        own.masked_fill_(hidden[:, None, :], float("-inf"))
    scores[..., width:] = own.view(groups, -1, slots)
    view = scores.view(groups, count, slots, repeats, width + slots)
    # Only columns at and after the first anchor of the group can lie at or after some anchor of it.
    ends = layout.ends[first:last]
    tail = int(layout.starts[first] + layout.anchors[first]) - low
    if tail < width:
        columns = torch.arange(low + tail, high, device=layout.device)
        view[..., tail:width].masked_fill_((columns >= ends[:, None])[:, None, None, :], float("-inf"))
    if window is not None:
        earliest = layout.slot_positions[first:last] + int(layout.starts[first]) - window + 1
        head = min(width, int(layout.starts[first] + layout.anchors[last - 1]) + slots - window - low)
        if head > 0:
            columns = torch.arange(low, low + head, device=layout.device)
            view[..., :head].masked_fill_((columns < earliest[..., None])[:, :, None, :], float("-inf"))
    return torch.softmax(scores, dim=-1)
