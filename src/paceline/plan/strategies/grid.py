"""Shape grid: a fresh random order inside every fine length class, one class after the other.

The classes are the padded widths (multiples of ``width_multiple``), so that padding is what rounding costs and nothing
more. What is left of a class flows into the next longer one: no partial batch but where a budget demands it. In a small
data set a class may hold no more than a batch or two, and the same samples would meet again every epoch: so
neighbouring widths share a class until it fills ``grid_class_batches`` batches, as long as that costs little.

How little: cut the samples in order of length, as ``sorted`` does. The batches of one width are a class of their own,
or join their neighbours where the joint class needs at most one batch more than they do and at most `MOST_GROWTH` times
their padded tokens. Every class cut by itself is one way to cut the epoch, and the cut made here is the shortest: so an
epoch has at most as many batches as ``sorted`` and one more for every joint class (draft positions aside).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.batches import Batches, class_composition, composed, cut_runs
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import Entries
from paceline.plan.rng import as_index, chunks, fits_word, random_order, sorted_words

MOST_GROWTH = 1.2
"""Padded tokens of a joint class over those of its parts, at most."""


@dataclass(frozen=True, slots=True)
class GridClasses:
    """Classes as stretches of the samples in order of width, shortest first.

    Attributes:
        ends: class c is the samples ``ends[c]`` to ``ends[c + 1]``, int64 [C + 1].
        widths: widest padded width of each class, int64 [C].
        joint: whether a class joins the batches of several widths, bool [C].
    """

    ends: np.ndarray
    widths: np.ndarray
    joint: np.ndarray


def compose(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Micro-batches of one epoch; see the registry for the signature."""
    q, count = limits.width_multiple, entries.count
    num_classes = -(-entries.longest // q)
    note_bits = (q - 1).bit_length() if fits_word(count, (q - 1).bit_length()) else 0
    describe = _widths_and_rests(entries.lengths, q, num_classes, with_rests=note_bits > 0)
    words, bounds = sorted_words(count, describe, num_classes, bits, note_bits)
    entries.know_histogram(np.diff(bounds))
    widths = np.arange(1, num_classes + 1, dtype=np.int64) * q
    made = grid_classes(bounds, widths, limits, settings.grid_class_batches)
    lengths = None
    if made.joint.any() or settings.draft_position_budget is not None:
        lengths = _sorted_lengths(words, bounds, entries.lengths, q, note_bits)
    words >>= np.uint32(note_bits)
    order = as_index(words, count)
    if lengths is None or not made.joint.any():
        return class_composition(order, bounds, widths, limits, entries.drafts(order, lengths))
    for start, stop in zip(made.ends[:-1][made.joint].tolist(), made.ends[1:][made.joint].tolist(), strict=True):
        shuffled = random_order(bits, stop - start)
        order[start:stop] = order[start:stop][shuffled]
        lengths[start:stop] = lengths[start:stop][shuffled]
    offsets = cut_runs(made.ends, made.widths, limits, entries.drafts(order, lengths))
    return composed(order, offsets, lengths, limits)


def _widths_and_rests(
    lengths: np.ndarray, q: int, num_classes: int, *, with_rests: bool
) -> Callable[[slice], tuple[np.ndarray, np.ndarray | None]]:
    """Width class (⌈length / q⌉ − 1) of a range of entries, and what rounding adds to each, in small types."""
    narrow = _narrow(num_classes * q)

    def describe(part: slice) -> tuple[np.ndarray, np.ndarray | None]:
        below = lengths[part].astype(narrow)
        below -= narrow(1)
        classes = below // narrow(q)
        if not with_rests:
            return classes, None
        below -= classes * narrow(q)
        return classes, narrow(q - 1) - below

    return describe


def _sorted_lengths(words: np.ndarray, bounds: np.ndarray, lengths: np.ndarray, q: int, note_bits: int) -> np.ndarray:
    """Lengths in sorted order [E]: the width less what rounding added, which travelled along, or else looked up."""
    if not note_bits:
        return lengths.take(words)
    narrow, mask = _narrow((len(bounds) - 1) * q), np.uint32((1 << note_bits) - 1)
    found = np.repeat((np.arange(1, len(bounds)) * q).astype(narrow), np.diff(bounds))
    for part in chunks(len(words)):
        found[part] -= (words[part] & mask).astype(narrow)
    return found


def _narrow(top: int) -> type[np.unsignedinteger]:
    """Smallest type for whole numbers up to ``top``."""
    return np.uint16 if top < 2**16 else np.uint32 if top < 2**32 else np.uint64


def grid_classes(bounds: np.ndarray, widths: np.ndarray, limits: BatchBudget, class_batches: int) -> GridClasses:
    """Joins neighbouring widths from below until a class fills ``class_batches`` batches, where that costs little.

    Args:
        bounds: width w is the samples ``bounds[w]`` to ``bounds[w + 1]``, int64 [widths + 1].
        widths: padded widths, ascending.
        limits: budgets, for the samples a batch holds.
        class_batches: batches after which a class is full; one that cannot be filled joins the last where it may.
    """
    offsets = cut_runs(bounds, widths, limits, None)
    top = np.searchsorted(bounds, offsets[1:] - 1, side="right") - 1
    first = np.flatnonzero(np.diff(top, prepend=-1))
    starts = np.append(offsets[first], offsets[-1])
    sizes, own = np.diff(starts).tolist(), widths[top[first]].tolist()
    batches = np.diff(first, append=len(top)).tolist()

    def costs_little(parts: range) -> bool:
        held, most = sum(sizes[parts.start : parts.stop]), own[parts.stop - 1]
        padded = sum(sizes[part] * own[part] for part in parts)
        needed = -(-held // limits.capacity(most))
        return needed <= sum(batches[parts.start : parts.stop]) + 1 and held * most <= MOST_GROWTH * padded

    groups: list[range] = []
    for part in range(len(sizes)):
        joined = range(groups[-1].start if groups else part, part + 1)
        open_still = groups and sum(batches[groups[-1].start : groups[-1].stop]) < class_batches
        if open_still and costs_little(joined):
            groups[-1] = joined
        else:
            groups.append(range(part, part + 1))
    if len(groups) > 1 and sum(batches[groups[-1].start :]) < class_batches:
        joined = range(groups[-2].start, groups[-1].stop)
        groups[-2:] = [joined] if costs_little(joined) else groups[-2:]
    ends = np.array([0, *(int(starts[group.stop]) for group in groups)], np.int64)
    joint = np.array([len(group) > 1 for group in groups])
    return GridClasses(ends, np.array([own[group.stop - 1] for group in groups], np.int64), joint)
