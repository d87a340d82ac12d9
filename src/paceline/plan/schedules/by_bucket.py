"""Schedules that look at nothing but the buckets, or at nothing at all."""

from __future__ import annotations

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.rng import ascending, random_halves, random_order
from paceline.plan.schedule_input import Pool, bucket_queues


def diverse(pool: Pool, settings: PlanConfig, bits: np.random.BitGenerator) -> np.ndarray:
    """Another bucket than the last one, drawn in proportion to what remains of each.

    Kept because people ask for it. It serves the largest bucket too seldom all epoch long, so that this bucket's
    backlog fills the end of the epoch; `stratified` has no such tail.
    """
    queued, bounds = bucket_queues(pool, bits)
    left = np.diff(bounds).tolist()
    heads = bounds[:-1].tolist()
    last, total, places = -1, len(queued), []
    for draw in random_halves(bits, len(queued)).tolist():
        others = total - (left[last] if last >= 0 else 0)
        if others:
            ticket = draw * others >> 32
            for number, remaining in enumerate(left):
                if number != last:
                    if ticket < remaining:
                        break
                    ticket -= remaining
            last = number
        left[last] -= 1
        total -= 1
        places.append(heads[last])
        heads[last] += 1
    return queued[np.array(places, np.int64)]


def proportional(pool: Pool, settings: PlanConfig, bits: np.random.BitGenerator) -> np.ndarray:
    """The bucket that is furthest behind its share comes next (largest n·t/N − served)."""
    queued, bounds = bucket_queues(pool, bits)
    sizes = np.diff(bounds).tolist()
    total = len(queued)
    deficits = [0] * len(sizes)  # size · t − served · total, so that no division is needed
    heads = bounds[:-1].tolist()
    places = []
    for _ in range(total):
        for number, size in enumerate(sizes):
            deficits[number] += size
        most = max(range(len(sizes)), key=deficits.__getitem__)
        deficits[most] -= total
        places.append(heads[most])
        heads[most] += 1
    return queued[np.array(places, np.int64)]


def round_robin(pool: Pool, settings: PlanConfig, bits: np.random.BitGenerator) -> np.ndarray:
    """One batch of every bucket in turn, skipping those that are used up; the largest is left at the end."""
    queued, bounds = bucket_queues(pool, bits)
    turn = np.arange(len(queued), dtype=np.int64) - np.repeat(bounds[:-1], np.diff(bounds))
    return queued[ascending(turn)]


def shuffled(pool: Pool, settings: PlanConfig, bits: np.random.BitGenerator) -> np.ndarray:
    """Any order."""
    return pool.ranking[random_order(bits, len(pool.ranking))]
