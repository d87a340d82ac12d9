"""Model FLOPs of one optimizer step, for the share of a device's peak that is used. No torch.

Multiply and add count as two. Only what the models need is counted: real tokens, no padding, nothing computed twice.

- target, per token of a sample of S tokens: 2·P + 4·layers·heads·head_dim·S/2, with P the linear weights of the layers
  up to the last one that is run, without the head.
- drafter, per sample with A anchors of K slots: A·K·(6·P_layers + 4·D·V + 3.5·layers·4·heads·head_dim·(S/2 + K))
  + S·(4·P_fc + 6·layers·P_kv). Backward costs twice the forward; the head is frozen, so it has no weight gradient.
"""

from __future__ import annotations

import numpy as np

from paceline.drafter.spec import DrafterSpec
from paceline.types import TargetFacts


def target_flops(facts: TargetFacts, layers: int, lengths: np.ndarray) -> float | None:
    """FLOPs of the target's forward over whole samples.

    Args:
        facts: of the target.
        layers: decoder layers that are run.
        lengths: tokens of each sample, int64 [B].

    Returns:
        None where the facts do not say what a token costs: mixtures of experts, unusual layers.
    """
    heads, head_dim, width = facts.num_attention_heads, facts.head_dim, facts.intermediate_size
    if not (heads and head_dim and width) or "moe" in f"{facts.architecture} {facts.model_type}".lower():
        return None
    key_heads = facts.num_key_value_heads or heads
    linear = layers * facts.hidden_size * (2 * head_dim * (heads + key_heads) + 3 * width)
    tokens, pairs = float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum()) / 2
    return 2 * linear * tokens + 4 * layers * heads * head_dim * pairs


def drafter_flops(spec: DrafterSpec, lengths: np.ndarray, anchors: np.ndarray) -> float:
    """FLOPs of the drafter's forward and backward.

    Args:
        spec: of the drafter.
        lengths, anchors: tokens and anchors of each sample, int64 [B].
    """
    hidden, across = spec.hidden_size, spec.num_attention_heads * spec.head_dim
    keys = 2 * hidden * spec.num_key_value_heads * spec.head_dim
    layers = spec.num_layers * (2 * hidden * across + keys + 3 * hidden * spec.intermediate_size)
    positions = anchors.astype(np.float64) * spec.block_size
    attention = 14 * spec.num_layers * across * (lengths / 2 + spec.block_size)
    blocks = positions * (6 * layers + 4 * hidden * spec.vocab_size + attention)
    context = lengths * (4.0 * len(spec.taps) * hidden * hidden + 6 * spec.num_layers * keys)
    return float(np.sum(blocks + context))
