"""Attention backends by name; all compute the same, tested equal to `dense`. `decode_attention` is that of decoding.

Each takes queries [G, A, K, R, E], context keys and values [G, S, E], own-block keys and values [G, A, K, E], the
`Layout`, the layer's window (None: full) and whether it is causal, and returns [G, A, K, R, E].

Shape letters: A anchors, K slots of a block, S context tokens of all documents, G key heads, R query heads per key
head, E head size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.drafter.attention.decode import decode_attention
from paceline.drafter.attention.dense import dense_attention
from paceline.drafter.attention.flex import flex_attention_over_blocks
from paceline.drafter.attention.layout import Layout
from paceline.drafter.attention.split import split_attention

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Layout, int | None, bool], Tensor]

BACKENDS: dict[str, Attention] = {
    "dense": dense_attention,
    "split": split_attention,
    "flex": flex_attention_over_blocks,
}

__all__ = ["BACKENDS", "Attention", "decode_attention"]
