"""Mixed: a batch is filled across ``mixed_span`` neighbouring buckets; these super-buckets overlap.

Every sample draws one of the super-buckets that cover its length, so that no edge always keeps two samples apart.
"""

from __future__ import annotations

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.batches import Batches, cut_classes
from paceline.plan.buckets import bucket_edges
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import Entries
from paceline.plan.rng import class_order, random_halves


def compose(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Micro-batches of one epoch; see the registry for the signature."""
    edges = bucket_edges(entries, settings)
    span = min(settings.mixed_span, len(edges))
    num_supers = len(edges) - span + 1
    bucket = np.searchsorted(edges, entries.lengths)
    lowest = np.maximum(bucket - span + 1, 0)
    choices = np.minimum(bucket, num_supers - 1) - lowest + 1
    drawn = lowest + (random_halves(bits, entries.count).astype(np.int64) * choices >> 32)
    order, bounds = class_order(drawn.astype(np.uint16), num_supers, bits)
    return cut_classes(order, bounds, entries, limits, edges)
