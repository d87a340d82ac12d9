"""Buckets: the few length ranges in which people look at a plan, and which the bucketed strategies and schedules use.

Shape letters: E entries, M micro-batches, K buckets.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.errors import PlanError
from paceline.plan.budget import BatchBudget
from paceline.plan.edges import best_edges
from paceline.plan.entries import Entries


def bucket_edges(entries: Entries, settings: PlanConfig) -> np.ndarray:
    """Upper ends of the buckets in tokens, ascending, int64 [K]; the last one covers the longest entry.

    Given ones are checked, ``optimal`` ones computed, and without either every bucket gets about the same number of
    samples (ends are multiples of ``width_multiple``; where many samples share one width there may be fewer buckets).

    Raises:
        PlanError: given edges do not cover the longest entry, or more buckets than distinct lengths are asked for.
    """
    longest = entries.longest
    if isinstance(settings.edges, list):
        if settings.edges[-1] < longest:
            raise PlanError(
                f"plan.edges end at {settings.edges[-1]} but the longest sample has {longest} tokens; "
                f"add an edge of {longest} or more, or leave longer samples out with plan.max_length"
            )
        needed = int(np.searchsorted(settings.edges, longest)) + 1
        return np.array(settings.edges[:needed], np.int64)
    if settings.edges == "optimal":
        best = _best(entries.histogram.tobytes(), BatchBudget.of(settings), settings.num_buckets)
        return np.array(best, np.int64)
    return even_edges(entries.histogram, settings.width_multiple, settings.num_buckets)


@lru_cache(maxsize=16)
def _best(histogram: bytes, limits: BatchBudget, num_buckets: int) -> tuple[int, ...]:
    # Kept between epochs: the search costs a second, the epochs' histograms are mostly the same.
    return tuple(best_edges(np.frombuffer(histogram, np.int64), limits, num_buckets).edges.tolist())


def even_edges(histogram: np.ndarray, width_multiple: int, num_buckets: int) -> np.ndarray:
    """Edges of buckets with about equal numbers of samples, multiples of ``width_multiple``, int64 [≤ num_buckets]."""
    below = np.cumsum(histogram)
    total = int(below[-1])
    targets = np.arange(1, num_buckets + 1, dtype=np.int64) * total // num_buckets
    classes = np.unique(np.searchsorted(below, np.maximum(targets, 1)))
    return (classes.astype(np.int64) + 1) * width_multiple


def bucket_of(widths: np.ndarray, edges: np.ndarray, limits: BatchBudget) -> np.ndarray:
    """Bucket of batches by their padded width, uint16, same shape."""
    return np.searchsorted(limits.widths(edges), widths).astype(np.uint16)
