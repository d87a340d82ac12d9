"""Makes the short window even: as many micro-batches for every replica, by splitting some of its batches.

Two halves of a batch keep every budget that the whole one kept, and cost one batch more an epoch at most for each
replica but one. Without this, replicas that synchronise after every micro-batch would wait for one another for good.

Shape letters: M micro-batches, R replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paceline.plan.batches import Batches
from paceline.plan.budget import BatchBudget


@dataclass(frozen=True, slots=True)
class EvenedWindow:
    """A composition after splitting.

    Attributes:
        composition: with the pieces in place of the split batches.
        first: new id of each old batch, its first piece, int64 [M].
        pieces: pieces of each old batch, int64 [M].
    """

    composition: Batches
    first: np.ndarray
    pieces: np.ndarray

    def leftover(self, old: np.ndarray) -> np.ndarray:
        """New ids of all pieces of some old batches, in their order."""
        parts = [np.arange(self.first[batch], self.first[batch] + self.pieces[batch]) for batch in old.tolist()]
        return np.concatenate(parts)


def splittable(
    leftover: np.ndarray, ranking: np.ndarray, sizes: np.ndarray, replicas: int, window_size: int
) -> np.ndarray:
    """The batches of the short window, some exchanged for larger ones where they cannot be split as often as needed.

    Where that is not enough either, the largest batches of as many whole windows as it takes join them.

    Args:
        leftover: ids of the batches in the short window.
        ranking: ids of all batches of the epoch, shortest first.
        sizes: samples of each batch.
        replicas: R.
        window_size: batches of a whole window.

    Returns:
        Ids, shortest first, as many as given and perhaps whole windows more; the given ones where they will do, or
        where nothing will.
    """
    missing = -len(leftover) % replicas
    if int((sizes[leftover] - 1).sum()) >= missing:
        return leftover
    chosen = leftover.tolist()
    largest_first = ranking[np.argsort(-sizes[ranking], kind="stable")]
    for batch in largest_first[: 2 * len(chosen)].tolist():
        smallest = min(chosen, key=lambda held: int(sizes[held]))
        if batch not in chosen and sizes[batch] > sizes[smallest]:
            chosen[chosen.index(smallest)] = batch
        if int((sizes[chosen] - 1).sum()) >= missing:
            break
    others = largest_first[~np.isin(largest_first, chosen)]
    while int((sizes[chosen] - 1).sum()) < missing and len(others):
        chosen += others[:window_size].tolist()
        others = others[window_size:]
    if int((sizes[chosen] - 1).sum()) < missing:
        return leftover
    return ranking[np.isin(ranking, chosen)]


def even_out(
    composition: Batches, leftover: np.ndarray, replicas: int, lengths: np.ndarray, limits: BatchBudget
) -> EvenedWindow | None:
    """Splits batches of the short window until its size is a multiple of the replicas.

    Args:
        composition: the epoch's batches.
        leftover: ids of those in the short window.
        replicas: R.
        lengths: of the entries, for the pieces' widths.
        limits: for the same.

    Returns:
        The evened composition; None where nothing need be split, or not enough can be (fewer samples than replicas).
    """
    missing = -len(leftover) % replicas
    if not missing:
        return None
    sizes = np.diff(composition.offsets).astype(np.int64)
    pieces = np.ones(composition.num_batches, np.int64)
    for _ in range(missing):
        largest = leftover[int(np.argmax(-(-sizes[leftover] // pieces[leftover])))]
        if sizes[largest] <= pieces[largest]:
            return None
        pieces[largest] += 1
    cuts = [
        int(composition.offsets[batch]) + int(sizes[batch]) * piece // int(pieces[batch])
        for batch in np.flatnonzero(pieces > 1).tolist()
        for piece in range(1, int(pieces[batch]))
    ]
    offsets = np.sort(np.concatenate([composition.offsets, np.array(cuts, composition.offsets.dtype)]))
    longest = np.maximum.reduceat(lengths[composition.order], offsets[:-1])
    width = np.where(np.repeat(pieces, pieces) > 1, limits.widths(longest), np.repeat(composition.width, pieces))
    bucket = None if composition.bucket is None else np.repeat(composition.bucket, pieces)
    made = replace(composition, offsets=offsets, width=width.astype(np.int32), bucket=bucket)
    return EvenedWindow(made, np.cumsum(pieces) - pieces, pieces)
