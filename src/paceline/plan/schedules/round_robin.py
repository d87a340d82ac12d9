"""Round robin: one batch of every bucket in turn, skipping those that are used up; the largest is left at the end."""

from __future__ import annotations

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.rng import ascending
from paceline.plan.schedule_input import Pool, bucket_queues


def arrange(pool: Pool, settings: PlanConfig, bits: np.random.BitGenerator) -> np.ndarray:
    """Batch ids in training order; see the registry for the signature."""
    queued, bounds = bucket_queues(pool, bits)
    turn = np.arange(len(queued), dtype=np.int64) - np.repeat(bounds[:-1], np.diff(bounds))
    return queued[ascending(turn)]
