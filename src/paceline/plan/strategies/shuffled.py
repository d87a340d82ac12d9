"""Shuffled: any sample with any other, each batch closed at its true running maximum. Most random, most padding."""

from __future__ import annotations

import numpy as np

from paceline.config.plan import PlanConfig
from paceline.plan.composition import Composition, cut_and_compose
from paceline.plan.intake import Entries
from paceline.plan.keys import random_order
from paceline.plan.limits import Limits


def compose(entries: Entries, limits: Limits, settings: PlanConfig, bits: np.random.BitGenerator) -> Composition:
    """Micro-batches of one epoch; see the registry for the signature."""
    return cut_and_compose(random_order(bits, entries.count), entries, limits)
