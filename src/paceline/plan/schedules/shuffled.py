"""Shuffled: any order."""

from __future__ import annotations

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.rng import random_order
from paceline.plan.schedule_input import Pool


def arrange(pool: Pool, settings: PlanConfig, bits: np.random.BitGenerator) -> np.ndarray:
    """Batch ids in training order; see the registry for the signature."""
    return pool.ranking[random_order(bits, len(pool.ranking))]
