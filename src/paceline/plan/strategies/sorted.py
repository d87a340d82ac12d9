"""Sorted: by exact length, once and for all. The baseline: no padding to speak of, the same batches every epoch."""

from __future__ import annotations

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.batches import Batches, class_composition
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import Entries
from paceline.plan.rng import ascending


def compose(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Micro-batches of one epoch; see the registry for the signature. Draws nothing."""
    order = ascending(entries.lengths)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(entries.histogram)])
    widths = np.arange(1, len(bounds), dtype=np.int64) * limits.width_multiple
    return class_composition(order, bounds, widths, limits, entries.drafts(order))
