"""Micro-batches as compact arrays, and the two ways to cut a sequence of samples into them.

Both cut greedily: a batch takes the next sample unless that would exceed a budget. ``cut_runs`` is the fast path for
sequences whose widths ascend in runs; ``cut_sequence`` walks sample by sample and serves any sequence.

Shape letters: E entries of the epoch, M micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.plan.budget import BatchBudget
from paceline.plan.entries import Entries
from paceline.plan.rng import chunks, index_dtype


@dataclass(frozen=True, slots=True)
class Batches:
    """The micro-batches of one epoch, in the order in which they were composed.

    Attributes:
        order: entries, batch after batch, int32 or int64 [E].
        offsets: batch m is ``order[offsets[m] : offsets[m + 1]]``, int64 [M + 1].
        width: padded width of each batch, int32 [M]; for packed bins the width of the longest document.
        length: how long the samples of each batch are, by which windows are balanced, int64 [M]: the width where the
            batches ascend, else the mean length × 1024. Integers, so that no platform rounds differently.
        packed: whether a batch is a bin of documents that a forward keeps apart, not a padded rectangle.
        bucket: bucket of each batch, uint16 [M], where the strategy knows it; None: by the width.
    """

    order: np.ndarray
    offsets: np.ndarray
    width: np.ndarray
    length: np.ndarray
    packed: bool = False
    bucket: np.ndarray | None = None

    @property
    def num_batches(self) -> int:
        """Number of micro-batches."""
        return len(self.width)


def composed(
    order: np.ndarray,
    offsets: np.ndarray,
    lengths: np.ndarray,
    limits: BatchBudget,
    *,
    packed: bool = False,
    edges: np.ndarray | None = None,
) -> Batches:
    """A composition whose widths, and buckets where there are ``edges``, are those of each batch's longest entry.

    Args:
        order, offsets: of the composition.
        lengths: of the entries in this order [E].
        limits: for the widths.
        packed: see `Batches`.
        edges: upper ends of the buckets.
    """
    offsets = offsets.astype(index_dtype(len(order) + 1))
    longest = np.maximum.reduceat(lengths, offsets[:-1])
    real_tokens = np.concatenate(
        [  # in parts, as the sum makes a wide copy
            np.add.reduceat(
                lengths[offsets[part.start] : offsets[part.stop]], offsets[part] - offsets[part.start], dtype=np.int64
            )
            for part in chunks(len(longest))
        ]
    )
    return Batches(
        order,
        offsets,
        limits.widths(longest).astype(np.int32),
        real_tokens * 1024 // np.diff(offsets),
        packed,
        None if edges is None else np.searchsorted(edges, longest).astype(np.uint16),
    )


def cut_runs(bounds: np.ndarray, widths: np.ndarray, limits: BatchBudget, drafts: np.ndarray | None) -> np.ndarray:
    """Cuts a sequence made of runs of equal, ascending width; what is left of a run flows into the next one.

    Args:
        bounds: run r is the positions ``bounds[r]`` to ``bounds[r + 1]``, int64 [R + 1]; runs may be empty.
        widths: padded width of each run, ascending, int64 [R].
        limits: budgets; a single sample of any run fits them.
        drafts: draft positions in sequence order [E], or None without such a budget.

    Returns:
        Offsets of the batches, int64 [M + 1]: the fewest contiguous batches that the budgets allow.
    """
    limit = limits.draft_limit
    pieces: list[np.ndarray] = [np.zeros(1, np.int64)]
    start = 0  # of the batch that is still open
    for run in np.flatnonzero(np.diff(bounds)).tolist():
        first, end, capacity = int(bounds[run]), int(bounds[run + 1]), limits.capacity(int(widths[run]))
        stop = min(start + capacity, end)
        if drafts is not None:
            held = np.cumsum(drafts[start : max(stop, first)])
            stop = min(stop, start + int(np.searchsorted(held, limit, side="right")))
        stop = max(stop, first)
        if stop == end:
            continue
        if stop > start:
            pieces.append(np.array([stop], np.int64))
            start = stop
        if drafts is not None:
            own = drafts[start:end]
            most = int(own.max())
            if most * capacity > limit and int(own.min()) < most:
                pieces.append(_cut_by_drafts(own, capacity, limit) + start)
                start = int(pieces[-1][-1]) if len(pieces[-1]) else start
                continue
            capacity = min(capacity, limit // max(most, 1))
        full = (end - start - 1) // capacity  # the last batch stays open: samples of the next run may fit it
        pieces.append(np.arange(1, full + 1, dtype=np.int64) * capacity + start)
        start += full * capacity
    if start < bounds[-1]:
        pieces.append(bounds[-1:].astype(np.int64))
    return np.concatenate(pieces)


def _cut_by_drafts(drafts: np.ndarray, capacity: int, limit: int) -> np.ndarray:
    """Ends of the batches inside one run whose samples differ in draft positions; the last batch stays open, int64.

    The end of a batch from any sample on is found for all samples at once; following the ends from the first sample is
    then a loop of one look-up a batch.
    """
    count = len(drafts)
    summed = np.zeros(count + 1, np.int64)
    np.cumsum(drafts, out=summed[1:])
    reach = np.searchsorted(summed, summed[:-1] + limit, side="right") - 1
    ends = np.minimum(reach, np.arange(count) + capacity).data
    found, place = [], 0
    while (stop := ends[place]) < count:
        found.append(stop)
        place = stop
    return np.array(found, np.int64)


def cut_sequence(widths: np.ndarray, limits: BatchBudget, drafts: np.ndarray | None) -> np.ndarray:
    """Cuts any sequence, closing a batch when the next sample would exceed a budget at the true running maximum.

    Args:
        widths: padded width of each sample, in sequence order [E].
        limits: budgets.
        drafts: draft positions in sequence order [E], or None.

    Returns:
        Offsets of the batches, int64 [M + 1].
    """
    capacity = {int(width): limits.capacity(int(width)) for width in np.unique(widths)}
    offsets, held, room, drafted = [0], 0, 0, 0
    draft_limit = limits.draft_limit
    draft_list = drafts.tolist() if drafts is not None else None
    for position, width in enumerate(widths.tolist()):
        own = capacity[width]
        room = own if not held or own < room else room
        draft = draft_list[position] if draft_list is not None else 0
        drafted += draft
        if held >= room or drafted > draft_limit:
            offsets.append(position)
            held, room, drafted = 0, own, draft
        held += 1
    offsets.append(len(widths))
    return np.array(offsets, np.int64)


def cut_and_compose(order: np.ndarray, entries: Entries, limits: BatchBudget) -> Batches:
    """Composition of entries in any order, cut greedily."""
    lengths = entries.lengths.take(order)
    offsets = cut_sequence(limits.widths(lengths), limits, entries.drafts(order, lengths))
    return composed(order, offsets, lengths, limits)


def cut_classes(
    order: np.ndarray, bounds: np.ndarray, entries: Entries, limits: BatchBudget, edges: np.ndarray
) -> Batches:
    """Composition of entries sorted by class, cut greedily inside each class; no batch holds two classes.

    A batch belongs to the bucket of its longest entry.
    """
    lengths = entries.lengths.take(order)
    widths, drafts = limits.widths(lengths), entries.drafts(order, lengths)
    pieces = [np.zeros(1, np.int64)]
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if stop > start:
            part = drafts[start:stop] if drafts is not None else None
            pieces.append(cut_sequence(widths[start:stop], limits, part)[1:] + start)
    return composed(order, np.concatenate(pieces), lengths, limits, edges=edges)


def class_composition(
    order: np.ndarray, bounds: np.ndarray, class_widths: np.ndarray, limits: BatchBudget, drafts: np.ndarray | None
) -> Batches:
    """Composition of entries sorted by width class: cut in runs, every batch as wide as its longest class.

    ``drafts`` are those of the entries in this order.
    """
    offsets = cut_runs(bounds, class_widths, limits, drafts)
    width = class_widths[np.searchsorted(bounds, offsets[1:] - 1, side="right") - 1]
    return Batches(order, offsets.astype(index_dtype(len(order) + 1)), width.astype(np.int32), width)


def rows_of(composition: Batches, batches: np.ndarray) -> np.ndarray:
    """Rows of some composed batches, one after another, int64."""
    offsets = composition.offsets
    parts = [composition.order[offsets[batch] : offsets[batch + 1]] for batch in batches.tolist()]
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
