"""Windowed: sorted inside shuffled windows of ``sort_window`` samples.

Every second window descends, so that a batch across a border meets like lengths.
"""

from __future__ import annotations

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.batches import Batches, cut_and_compose
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import Entries
from paceline.plan.rng import ascending, random_order


def compose(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Micro-batches of one epoch; see the registry for the signature."""
    order = random_order(bits, entries.count)
    window = np.arange(entries.count, dtype=np.int64) // settings.sort_window
    lengths = entries.lengths[order].astype(np.int64)
    top = int(lengths.max()) + 1
    key = window * top + np.where(window % 2 == 0, lengths, top - 1 - lengths)
    return cut_and_compose(order[ascending(key)], entries, limits)
