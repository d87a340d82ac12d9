"""What decoding holds and moves, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.decode.session import TargetSession

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter
    from paceline.target_model.model import TargetModel

PROBE_TOKENS = 4
"""Tokens that are read to see by how much the target's cache grows."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, in the types in which the evaluation ran.

    Attributes:
        target_weights, drafter_weights: held once; a tensor that is used twice counts once.
        target_cache_per_token: keys and values of one token, over all layers; layers with a window need them for the
            tokens inside it alone.
        target_state: recurrent state of a sequence, whatever its length.
        drafter_cache_per_token: keys and values of one context token, over all draft layers.
        features_per_token: what goes from target to drafter for one token.
        weights_read_per_token: both models' weights are read once a target pass, so this over τ for a new token; None
            without a pass. Plain decoding reads `target_weights` for one.
    """

    target_weights: int
    drafter_weights: int
    target_cache_per_token: int
    target_state: int
    drafter_cache_per_token: int
    features_per_token: int
    weights_read_per_token: int | None


def measure_memory(target: TargetModel, network: Drafter, tau: float | None) -> Memory:
    """Bytes of a pair.

    Args:
        target: reads a few tokens.
        network: the drafter.
        tau: tokens per target pass; None where there was none.
    """
    session = TargetSession(target)
    sizes = []
    for _ in range(2):
        session.read(torch.zeros(PROBE_TOKENS, dtype=torch.int64, device=target.device), last_only=True)
        session.rewind(session.length)
        sizes.append(session.used_bytes)
    spec, width = network.spec, target.dtype.itemsize
    target_weights = _weights(target.model)
    drafter_weights = _weights(network)
    per_token = (sizes[1] - sizes[0]) // PROBE_TOKENS
    return Memory(
        target_weights=target_weights,
        drafter_weights=drafter_weights,
        target_cache_per_token=per_token,
        target_state=sizes[0] - PROBE_TOKENS * per_token,
        drafter_cache_per_token=2 * spec.num_layers * spec.num_key_value_heads * spec.head_dim * width,
        features_per_token=target.width * width,
        weights_read_per_token=round((target_weights + drafter_weights) / tau) if tau else None,
    )


def _weights(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
