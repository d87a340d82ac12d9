"""Anchors: which positions of a sample open a block. numpy only.

An anchor is the last clean token of a block; the tokens after it are what the drafter must say. A position is
eligible iff its token and the next one are supervised, so that the first draft always has a label. (The first token
of an answer is therefore never a label: while decoding the target itself gives it, as the first anchor.)
"""

from __future__ import annotations

import numpy as np

_KEY = 0x70616365_6C696E65
"""Second word of the generator's key: keeps this stream apart from others with the same seed."""


def eligible_positions(loss_mask: np.ndarray) -> np.ndarray:
    """Positions that may be anchors, ascending, int64.

    Args:
        loss_mask: True where the token is supervised, bool [length].
    """
    mask = np.asarray(loss_mask, dtype=bool)
    return np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int64)


def count_eligible(loss_mask: np.ndarray) -> int:
    """Number of eligible positions of a sample; see `eligible_positions`."""
    mask = np.asarray(loss_mask, dtype=bool)
    return int(np.count_nonzero(mask[:-1] & mask[1:]))


def sample_anchors(loss_mask: np.ndarray, *, seed: int, epoch: int, sample: int, limit: int) -> np.ndarray:
    """Anchors of one sample in one epoch: uniform over the eligible positions, without replacement, ascending.

    The draw depends on nothing but (seed, epoch, sample): every eligible position gets a 64-bit number of the
    counter-based Philox generator, and the `limit` smallest win. The raw numbers of Philox are specified, so the draw
    is the same on every machine and numpy version.

    Args:
        loss_mask: True where the token is supervised, bool [length].
        seed, epoch, sample: the key; each from 0 to 2**64 - 1.
        limit: most anchors.

    Returns:
        Positions, int64 [min(limit, eligible)].
    """
    positions = eligible_positions(loss_mask)
    if len(positions) <= limit:
        return positions
    # Philox writes four numbers per counter value and counts up in the first two words only.
    counter = np.array([0, 0, epoch, sample], dtype=np.uint64)
    raw = np.random.Philox(counter=counter, key=np.array([seed, _KEY], dtype=np.uint64)).random_raw(len(positions))
    winners = np.argsort(raw, kind="stable")[:limit]
    return np.sort(positions[winners])
