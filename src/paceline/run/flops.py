"""Model FLOPs of the drafter in one optimizer step, for the share of a device's peak that is used. No torch.

Multiply and add count as two. Only what the model needs is counted: real tokens, no padding, nothing computed twice.
Per sample with A anchors of K slots, J of them drafts, and S tokens:
A·(K·(6·P_layers + 12·H·E·Σ over layers of keys seen) + J·4·D·V) + S·(4·P_fc + 6·layers·P_kv).
Backward costs twice the forward; the head is frozen and the features are given, so each lacks one of its gradients.
"""

from __future__ import annotations

import numpy as np

from paceline.drafter.spec import DrafterSpec


def drafter_flops(spec: DrafterSpec, lengths: np.ndarray, anchors: np.ndarray) -> float:
    """FLOPs of the drafter's forward and backward.

    Args:
        spec: of the drafter.
        lengths, anchors: tokens and anchors of each sample, int64 [B].
    """
    hidden, across = spec.hidden_size, spec.num_attention_heads * spec.head_dim
    keys = 2 * hidden * spec.num_key_value_heads * spec.head_dim
    layers = spec.num_layers * (2 * hidden * across + keys + 3 * hidden * spec.intermediate_size)
    tokens, drawn = lengths.astype(np.float64), anchors.astype(np.float64)
    seen = sum(_context_seen(tokens, spec.window(index)) + spec.block_size for index in range(spec.num_layers))
    blocks = drawn * spec.block_size * (6 * layers + 12 * across * seen)
    head = drawn * spec.num_drafts * 4 * hidden * spec.vocab_size
    context = tokens * (4.0 * len(spec.taps) * hidden * hidden + 6 * spec.num_layers * keys)
    return float(np.sum(blocks + head + context))


def _context_seen(tokens: np.ndarray, window: int | None) -> np.ndarray:
    """Context tokens that an anchor's block sees in a layer, a mean over all places of the anchor."""
    most = tokens if window is None else np.minimum(tokens, window)
    return most - most**2 / (2 * np.maximum(tokens, 1))
