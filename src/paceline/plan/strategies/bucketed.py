"""Bucketed: shuffled inside a few length ranges; a batch never leaves its bucket.

The ranges are the plan's buckets: given edges, the best ones for K (``edges: optimal``), or equal sample counts.
"""

from __future__ import annotations

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.batches import Batches, cut_classes
from paceline.plan.buckets import bucket_edges
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import Entries
from paceline.plan.rng import class_order


def compose(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Micro-batches of one epoch; see the registry for the signature."""
    edges = bucket_edges(entries, settings)
    order, bounds = class_order(np.searchsorted(edges, entries.lengths).astype(np.uint16), len(edges), bits)
    return cut_classes(order, bounds, entries, limits, edges)
