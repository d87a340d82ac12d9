"""What a schedule arranges: the batches of an epoch that fill whole windows.

Shape letters: M micro-batches, P of them in the pool, W windows, G batches a window (accumulate × replicas).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.plan.rng import ascending, class_order, random_halves


@dataclass(frozen=True, slots=True)
class Pool:
    """Batches to arrange.

    Attributes:
        ranking: batch ids, shortest first, [P]; P is a multiple of the window size.
        bucket: bucket of each batch of the epoch, uint16 [M].
        length: size of each batch's samples by which windows are balanced, int64 [M].
        num_buckets: number of buckets.
        accumulate: slots of a window.
        replicas: drafter replicas.
        epoch: 0-based epoch.
    """

    ranking: np.ndarray
    bucket: np.ndarray
    length: np.ndarray
    num_buckets: int
    accumulate: int
    replicas: int
    epoch: int

    @property
    def window_size(self) -> int:
        """Batches of one window: accumulate × replicas."""
        return self.accumulate * self.replicas

    @property
    def num_windows(self) -> int:
        """Whole windows in the pool."""
        return len(self.ranking) // self.window_size


def rank_batches(bucket: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Batch ids by ascending bucket, inside a bucket by ascending length, then as composed, int32 [M]."""
    by_length = ascending(length)
    return by_length[ascending(bucket[by_length])]


def bucket_queues(pool: Pool, bits: np.random.BitGenerator) -> tuple[np.ndarray, np.ndarray]:
    """The pool's batches by bucket, in random order inside each: ids [P] and bounds, int64 [num_buckets + 1]."""
    order, bounds = class_order(pool.bucket[pool.ranking], pool.num_buckets, bits)
    return pool.ranking[order], bounds


def split_leftover(
    ranking: np.ndarray, window_size: int, bits: np.random.BitGenerator
) -> tuple[np.ndarray, np.ndarray]:
    """Takes out the batches that fill no whole window: spread evenly over the lengths, at a random place in each part.

    Returns:
        ranking: of the others, a multiple of ``window_size``.
        leftover: batch ids, shortest first, fewer than ``window_size``.
    """
    count = len(ranking)
    rest = count % window_size
    if not rest:
        return ranking, ranking[:0]
    cuts = np.arange(rest + 1, dtype=np.int64) * count // rest
    spans = np.diff(cuts)
    chosen = cuts[:-1] + (random_halves(bits, rest).astype(np.int64) * spans >> 32)
    kept = np.ones(count, bool)
    kept[chosen] = False
    return ranking[kept], ranking[chosen]
