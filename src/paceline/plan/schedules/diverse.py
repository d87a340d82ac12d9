"""Diverse: another bucket than the last one, drawn in proportion to what remains of each.

Kept because people ask for it. It serves the largest bucket too seldom all epoch long, so that this bucket's backlog
fills the end of the epoch; `stratified` has no such tail.
"""

from __future__ import annotations

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.rng import random_halves
from paceline.plan.schedule_input import Pool, bucket_queues


def arrange(pool: Pool, settings: PlanConfig, bits: np.random.BitGenerator) -> np.ndarray:
    """Batch ids in training order; see the registry for the signature."""
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
