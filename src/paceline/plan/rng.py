"""Keyed randomness and sorting for plans: the same bits on every platform, every numpy and in every process.

Only raw words of the generator are used (numpy guarantees them for good; the distributions of `Generator` may change),
and every order is the ascending order of distinct integers, so no sort needs to be stable and none can differ.

Shape letters: N items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

    Args:
        classes: class of each item, unsigned integers below ``num_classes`` [N].
        num_classes: number of classes.
        bits: where the randomness comes from; None keeps the items' own order inside a class.

    Returns:
        order: items by class, int32 or int64 [N].
        bounds: class c is ``order[bounds[c] : bounds[c + 1]]``, int64 [num_classes + 1].
    """
    words, bounds = sorted_words(len(classes), lambda part: (classes[part], None), num_classes, bits, 0)
    return as_index(words, len(classes)), bounds


def sorted_words(
    count: int,
    describe: Callable[[slice], tuple[np.ndarray, np.ndarray | None]],
    num_classes: int,
    bits: np.random.BitGenerator | None,
    note_bits: int,
) -> tuple[np.ndarray, np.ndarray]:
    """As `class_order`, and a short note about each item travels with it, so that nobody looks it up afterwards.

    One in-place sort of 64-bit integers (class and randomness above, index and note below), the only large memory.

    Args:
        count: number of items, N.
        describe: classes and notes of a range of items; notes are below 2^``note_bits``, None where that is 0.
        num_classes, bits: as for `class_order`.
        note_bits: room for notes; needs ``fits_word(count, note_bits)``.

    Returns:
        words: index · 2^``note_bits`` + note by class, uint32 [N], in memory of their own.
        bounds: as for `class_order`.
    """
    class_bits = (num_classes - 1).bit_length()
    if not fits_word(count, note_bits) or class_bits > 24:
        raise PlanError(f"{count} samples in {num_classes} length classes are too many; raise plan.width_multiple")
    keys = np.empty(count, "<u8")
    halves = keys.view("<u4").reshape(count, 2)  # low half: index and note, high half: class and randomness
    for part in chunks(count):
        classes, notes = describe(part)
        high = classes.astype(np.uint32)
        high <<= np.uint32(32 - class_bits) if class_bits else np.uint32(0)
        if bits is not None:
            high |= random_halves(bits, len(high)) >> np.uint32(class_bits)
        low = np.arange(part.start, part.stop, dtype=np.uint32)
        if notes is not None:
            low <<= np.uint32(note_bits)
            low |= notes
        halves[part, 1] = high
        halves[part, 0] = low
    keys.sort()
    firsts = np.arange(num_classes, dtype=np.uint64) << np.uint64(min(64 - class_bits, 63))
    bounds = np.append(np.searchsorted(keys, firsts), count)
    words = keys.view("<u4")
    for part in chunks(count):  # the low halves move to the front; the other half of the memory is given back
        words[part] = halves[part, 0]
    del words, halves
    keys.resize((count + 1) // 2, refcheck=False)
    return keys.view("<u4")[:count], bounds


def fits_word(count: int, note_bits: int) -> bool:
    """Whether the index of each of ``count`` items and a note of so many bits fit 32 bits."""
    return count << note_bits < 2**32


def as_index(words: np.ndarray, count: int) -> np.ndarray:
    """Indices below ``count`` in their signed type, without a copy where they have its size."""
    return words.view("<i4") if index_dtype(count).itemsize == 4 else words.astype(np.int64)


def chunks(count: int) -> Iterator[slice]:
    """Ranges of `CHUNK` items at most."""
    return (slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))


def ascending(values: np.ndarray) -> np.ndarray:
    """Items by ascending value, equal ones in their own order, int32 or int64 [N]; values are integers ≥ 0."""
    if (values[1:] >= values[:-1]).all():
        return np.arange(len(values), dtype=index_dtype(len(values)))
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
