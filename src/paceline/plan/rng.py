"""Keyed randomness and sorting for plans: the same bits on every platform, every numpy and in every process.

Only raw words of the generator are used (numpy guarantees them for good; the distributions of `Generator` may change),
and every order is the ascending order of distinct integers, so no sort needs to be stable and none can differ.

Shape letters: N items.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from paceline.errors import PlanError

CHUNK = 1 << 15
"""Items that are handled at once, so that temporaries stay in cache; even, because a word gives two items."""


class Purpose(IntEnum):
    """What a stream is drawn for. Numbers are part of every plan's identity: add, never renumber."""

    COMPOSE = 1
    SCHEDULE = 2
    LEFTOVER = 3
    WEIGHTS = 4


def stream(seed: int, epoch: int, purpose: Purpose) -> np.random.BitGenerator:
    """The bit generator of one (seed, epoch, purpose)."""
    return np.random.PCG64DXSM(np.random.SeedSequence([seed, epoch, int(purpose)]))


def random_halves(bits: np.random.BitGenerator, count: int) -> np.ndarray:
    """Uniform 32-bit integers, uint32 [count]; low half of each 64-bit word first."""
    words = bits.random_raw((count + 1) // 2)
    return words.astype("<u8", copy=False).view("<u4")[:count]


def index_dtype(count: int) -> np.dtype:
    """Smallest signed integer type for indices below ``count``: int32 or int64."""
    return np.dtype(np.int32 if count < 2**31 else np.int64)


def random_order(bits: np.random.BitGenerator, count: int) -> np.ndarray:
    """A uniformly random permutation, int32 or int64 [count]."""
    return class_order(np.zeros(count, np.uint8), 1, bits)[0]


def class_order(
    classes: np.ndarray, num_classes: int, bits: np.random.BitGenerator | None
) -> tuple[np.ndarray, np.ndarray]:
    """Sorts items by class, in random order inside each class.

    One in-place sort of 64-bit integers (class and randomness above, index below): 8 bytes an item beside the result.

    Args:
        classes: class of each item, unsigned integers below ``num_classes`` [N].
        num_classes: number of classes.
        bits: where the randomness comes from; None keeps the items' own order inside a class.

    Returns:
        order: items by class, int32 or int64 [N].
        bounds: class c is ``order[bounds[c] : bounds[c + 1]]``, int64 [num_classes + 1].
    """
    count, class_bits = len(classes), (num_classes - 1).bit_length()
    if count >= 2**32 or class_bits > 24:
        raise PlanError(f"{count} samples in {num_classes} length classes are too many; raise plan.width_multiple")
    keys = np.empty(count, "<u8")
    halves = keys.view("<u4").reshape(count, 2)  # low half: index, high half: class and randomness
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        high = classes[start:stop].astype(np.uint32)
        high <<= np.uint32(32 - class_bits) if class_bits else np.uint32(0)
        if bits is not None:
            high |= random_halves(bits, stop - start) >> np.uint32(class_bits)
        halves[start:stop, 1] = high
        halves[start:stop, 0] = np.arange(start, stop, dtype=np.uint32)
    keys.sort()
    firsts = np.arange(num_classes, dtype=np.uint64) << np.uint64(min(64 - class_bits, 63))
    bounds = np.empty(num_classes + 1, np.int64)
    bounds[:-1] = np.searchsorted(keys, firsts)
    bounds[-1] = count
    return halves[:, 0].astype(index_dtype(count)), bounds


def ascending(values: np.ndarray) -> np.ndarray:
    """Items by ascending value, equal ones in their own order, int32 or int64 [N]; values are integers ≥ 0."""
    if not len(values):
        return np.empty(0, np.int32)
    top = int(values.max())
    index_bits = max(len(values) - 1, 1).bit_length()
    if top.bit_length() + index_bits > 64:
        return np.argsort(values, kind="stable").astype(index_dtype(len(values)))
    keys = values.astype(np.uint64)
    keys <<= np.uint64(index_bits)
    keys |= np.arange(len(values), dtype=np.uint64)
    keys.sort()
    keys &= np.uint64((1 << index_bits) - 1)
    return keys.astype(index_dtype(len(values)))
