"""Schedules by name: ``arrange(pool, settings, bits) -> sequence``.

In: the batches that fill whole windows (with their rank by length and their bucket), the planning settings, the bit
generator keyed by (seed, epoch). Out: batch ids in training order; every ``pool.window_size`` of them are one window,
slot after slot, in each slot replica after replica.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.schedule_input import Pool
from paceline.plan.schedules import by_bucket, stratified

Arrange = Callable[[Pool, PlanConfig, np.random.BitGenerator], np.ndarray]

SCHEDULES: dict[str, Arrange] = {
    "stratified": stratified.stratified,
    "proportional": by_bucket.proportional,
    "diverse": by_bucket.diverse,
    "round_robin": by_bucket.round_robin,
    "shuffled": by_bucket.shuffled,
    "curriculum": stratified.curriculum,
}
