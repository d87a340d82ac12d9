"""Curriculum: for the first epochs, a share of the windows goes from short to long in stages; the rest is stratified.

The share is taken evenly over all lengths, so that the stratified rest of the epoch has the data's own mixture. Inside
a stage the windows are stratified over the stage's lengths.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.schedule_input import Pool
from paceline.plan.schedules.stratified import stratify


def arrange(pool: Pool, settings: PlanConfig, bits: np.random.BitGenerator) -> np.ndarray:
    """Batch ids in training order; see the registry for the signature."""
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
