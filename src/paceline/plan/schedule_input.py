"""What a schedule arranges: the batches of an epoch that fill whole windows.

Shape letters: M micro-batches, P of them in the pool, W windows, G batches a window (accumulate × replicas).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.plan.batches import Batches
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


def batch_lengths(composition: Batches, lengths: np.ndarray) -> np.ndarray:
    """How long the samples of each batch are, int64 [M]: the width where batches ascend, else the mean length × 1024.

    Integers, so that no platform rounds differently.
    """
    if composition.ascending:
        return composition.width.astype(np.int64)
    return real_tokens(composition, lengths) * 1024 // np.diff(composition.offsets)


def rank_batches(composition: Batches, bucket: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Batch ids by ascending bucket, inside a bucket by ascending length, then as composed, int32 [M]."""
    if composition.ascending:
        return np.arange(composition.num_batches, dtype=np.int32)
    by_length = ascending(length)
    return by_length[ascending(bucket[by_length])]


def real_tokens(composition: Batches, lengths: np.ndarray) -> np.ndarray:
    """Sum of the lengths of each batch, int64 [M]."""
    ordered = lengths[composition.order]
    return np.add.reduceat(ordered, composition.offsets[:-1], dtype=np.int64)


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
