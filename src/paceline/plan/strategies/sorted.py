"""Sorted: by exact length, once and for all. The baseline: no padding to speak of, the same batches every epoch."""

from __future__ import annotations

import numpy as np

from paceline.config.plan import PlanConfig
from paceline.plan.composition import Composition, class_composition
from paceline.plan.intake import Entries
from paceline.plan.keys import ascending
from paceline.plan.limits import Limits


def compose(entries: Entries, limits: Limits, settings: PlanConfig, bits: np.random.BitGenerator) -> Composition:
    """Micro-batches of one epoch; see the registry for the signature. Draws nothing."""
    order = ascending(entries.lengths)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(entries.histogram)])
    widths = np.arange(1, len(bounds), dtype=np.int64) * limits.width_multiple
    return class_composition(order, bounds, widths, limits, entries.drafts)
