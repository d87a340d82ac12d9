"""Stratified, and the curriculum that begins with short samples: one batch of every length stratum in each window.

The batches, sorted by length, are cut into accumulate × replicas strata of W batches, and every window takes one of
each. Where a bucket ends in another stratum than the one in which it begins, its two partial shares go to different
windows as far as that is possible: so every window holds ⌊n/W⌋ or ⌈n/W⌉ of the n batches of every bucket, from the
first window to the last, which is as even as whole batches can be.

Within that rule the dealing is antithetic by default: whoever holds the longest batches so far takes the shortest of
the next stratum, so that the mean length of the windows hardly varies; otherwise it is random.

Strata are nested: accumulate coarse ones, one a slot, each cut into one fine stratum a replica. So every replica alone
also sees all coarse strata, and the replicas work on similar lengths at the same time.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.rng import ascending, random_halves, random_order
from paceline.plan.schedule_input import Pool


def stratified(pool: Pool, settings: PlanConfig, bits: np.random.BitGenerator) -> np.ndarray:
    """One batch of every length stratum in each window."""
    return stratify(pool.ranking, pool, bits, antithetic=settings.antithetic)


def curriculum(pool: Pool, settings: PlanConfig, bits: np.random.BitGenerator) -> np.ndarray:
    """For the first epochs, a share of the windows goes from short to long in stages; the rest is stratified.

    The share is taken evenly over all lengths, so that the stratified rest of the epoch has the data's own mixture.
    Inside a stage the windows are stratified over the stage's lengths.
    """
    if pool.epoch >= settings.curriculum_epochs:
        return stratify(pool.ranking, pool, bits, antithetic=settings.antithetic)
    total, size = len(pool.ranking), pool.window_size
    rising_windows = int(pool.num_windows * Fraction(str(settings.curriculum_share)))
    rising = rising_windows * size
    place = np.arange(total, dtype=np.int64)
    early = (place + 1) * rising // max(total, 1) > place * rising // max(total, 1)
    parts = []
    stages = np.arange(settings.curriculum_stages + 1, dtype=np.int64) * rising_windows // settings.curriculum_stages
    for start, stop in zip(stages[:-1].tolist(), stages[1:].tolist(), strict=True):
        stage = pool.ranking[early][start * size : stop * size]
        parts.append(stratify(stage, pool, bits, antithetic=settings.antithetic))
    parts.append(stratify(pool.ranking[~early], pool, bits, antithetic=settings.antithetic))
    return np.concatenate(parts)


def stratify(ranking: np.ndarray, pool: Pool, bits: np.random.BitGenerator, *, antithetic: bool = False) -> np.ndarray:
    """Deals a ranking into windows.

    Args:
        ranking: batch ids, shortest first, buckets contiguous [W · accumulate · replicas].
        pool: buckets, lengths and the shape of a window.
        bits: who takes which batch, the order of the slots inside a window, of the replicas inside a slot.
        antithetic: whether windows are balanced by length instead of dealt at random.

    Returns:
        Batch ids in training order, same length and type.
    """
    num_windows = len(ranking) // pool.window_size
    if not num_windows:
        return ranking
    dealt = deal_strata(ranking, pool, bits, antithetic=antithetic)
    windows = dealt.T.reshape(num_windows, pool.accumulate, pool.replicas)
    if antithetic:
        windows = windows[random_order(bits, num_windows)]
    slots = _shuffle_within(num_windows, pool.accumulate, bits)
    windows = np.take_along_axis(windows, slots[:, :, None], axis=1)
    if pool.replicas > 1:
        places = _shuffle_within(num_windows * pool.accumulate, pool.replicas, bits)
        windows = np.take_along_axis(windows.reshape(-1, pool.replicas), places, axis=1)
    return windows.reshape(-1)


def deal_strata(ranking: np.ndarray, pool: Pool, bits: np.random.BitGenerator, *, antithetic: bool) -> np.ndarray:
    """Batch of each stratum (longest first) and window, [accumulate · replicas, W]; arguments as for `stratify`."""
    strata = ranking[::-1].reshape(pool.window_size, -1)
    num_windows = strata.shape[1]
    dealt = np.empty_like(strata)
    load = np.zeros(num_windows, np.int64)
    begun = np.zeros(
        num_windows, bool
    )  # windows that hold the first part of the bucket which continues in this stratum
    going_on = -1
    for number, stratum in enumerate(strata):
        buckets = pool.bucket[stratum]
        head = int(np.count_nonzero(buckets == going_on))
        preferred = random_order(bits, num_windows)
        if antithetic:
            preferred = preferred[ascending(load[preferred])]
        takers = _takers(preferred, begun, head) if 0 < head < num_windows else preferred
        dealt[number, takers] = stratum
        if antithetic:
            load += pool.length[dealt[number]]
        going_on = int(buckets[-1])
        if head < num_windows:
            begun[:] = False
            begun[takers[num_windows - int(np.count_nonzero(buckets == going_on)) :]] = True
    return dealt


def _takers(preferred: np.ndarray, begun: np.ndarray, head: int) -> np.ndarray:
    """Windows in the order in which they take a stratum whose first ``head`` batches continue the bucket of ``begun``.

    Windows without that bucket take the head. Those that have it come next: they hold the short end of the stratum
    before, and are so paid back in length. Where the head is larger than the windows without it, it reaches into them.
    """
    has = begun[preferred]
    without, having = preferred[~has], preferred[has]
    return np.concatenate([without[:head], having, without[head:]])


def _shuffle_within(rows: int, columns: int, bits: np.random.BitGenerator) -> np.ndarray:
    """An independent random permutation of ``columns`` for each row, int64 [rows, columns]."""
    keys = random_halves(bits, rows * columns).astype(np.uint64).reshape(rows, columns)
    keys <<= np.uint64(32)
    keys |= np.arange(columns, dtype=np.uint64)
    keys.sort(axis=1)
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
