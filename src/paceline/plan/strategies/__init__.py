"""Composition strategies by name: ``compose(entries, limits, settings, bits) -> Batches``.

In: the entries of the epoch, the budgets, the planning settings, the bit generator keyed by
(seed, epoch). Out: every entry in exactly one batch, no budget exceeded, the same for the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.batches import Batches
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import Entries
from paceline.plan.strategies import grid, packed, sequences

Compose = Callable[[Entries, BatchBudget, PlanConfig, np.random.BitGenerator], Batches]

STRATEGIES: dict[str, Compose] = {
    "grid": grid.compose,
    "sorted": sequences.by_length,
    "shuffled": sequences.shuffled,
    "jittered": sequences.jittered,
    "windowed": sequences.windowed,
    "bucketed": sequences.bucketed,
    "mixed": sequences.mixed,
    "packed": packed.compose,
}
