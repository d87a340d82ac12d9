"""Proportional: the bucket that is furthest behind its share comes next (largest n·t/N − served)."""

from __future__ import annotations

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.schedule_input import Pool, bucket_queues


def arrange(pool: Pool, settings: PlanConfig, bits: np.random.BitGenerator) -> np.ndarray:
    """Batch ids in training order; see the registry for the signature."""
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
