"""Strategies that put the samples in some order and cut it greedily, at the true running maximum."""

from __future__ import annotations

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.batches import Batches, class_composition, cut_and_compose, cut_classes
from paceline.plan.buckets import bucket_edges
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import Entries
from paceline.plan.rng import ascending, chunks, class_order, random_halves, random_order

HALVES = 8
"""Uniform 16-bit integers summed for one deviate: close to normal, and the same integer on every platform."""
DEVIATION = 53_510
"""Standard deviation of that sum, 2^16 · √(8/12)."""
MILLION = 1_000_000


def shuffled(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Any sample with any other. Most random, most padding."""
    return cut_and_compose(random_order(bits, entries.count), entries, limits)


def by_length(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Sorted by exact length, once and for all: no padding to speak of, the same batches every epoch. Draws nothing."""
    order = ascending(entries.lengths)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(entries.histogram)])
    widths = np.arange(1, len(bounds), dtype=np.int64) * limits.width_multiple
    return class_composition(order, bounds, widths, limits, entries.drafts(order))


def windowed(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Sorted inside shuffled windows of ``sort_window`` samples.

    Every second window descends, so that a batch across a border meets like lengths.
    """
    order = random_order(bits, entries.count)
    window = np.arange(entries.count, dtype=np.int64) // settings.sort_window
    lengths = entries.lengths[order].astype(np.int64)
    top = int(lengths.max()) + 1
    key = window * top + np.where(window % 2 == 0, lengths, top - 1 - lengths)
    return cut_and_compose(order[ascending(key)], entries, limits)


def jittered(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Sorted by a perturbed length, length × (1 + N(0, jitter)), in units of about 1/50 token, at least 0."""
    share = round(settings.jitter * MILLION)
    perturbed = np.empty(entries.count, np.int64)
    for part in chunks(entries.count):
        lengths = entries.lengths[part].astype(np.int64)
        words = bits.random_raw(2 * len(lengths)).astype("<u8", copy=False).view("<u2").reshape(len(lengths), HALVES)
        deviates = words.sum(axis=1, dtype=np.int64) - HALVES * 0x7FFF - HALVES // 2
        factor = np.maximum(MILLION * DEVIATION + share * deviates, 0)
        perturbed[part] = lengths * (factor >> 10) >> 20
    return cut_and_compose(ascending(perturbed), entries, limits)


def bucketed(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Shuffled inside the plan's buckets; a batch never leaves its bucket."""
    edges = bucket_edges(entries, settings)
    order, bounds = class_order(np.searchsorted(edges, entries.lengths).astype(np.uint16), len(edges), bits)
    return cut_classes(order, bounds, entries, limits, edges)


def mixed(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Shuffled across ``mixed_span`` neighboring buckets; these super-buckets overlap.

    Every sample draws one of the super-buckets that cover its length, so that no edge always keeps two samples apart.
    """
    edges = bucket_edges(entries, settings)
    span = min(settings.mixed_span, len(edges))
    num_supers = len(edges) - span + 1
    bucket = np.searchsorted(edges, entries.lengths)
    lowest = np.maximum(bucket - span + 1, 0)
    choices = np.minimum(bucket, num_supers - 1) - lowest + 1
    drawn = lowest + (random_halves(bits, entries.count).astype(np.int64) * choices >> 32)
    order, bounds = class_order(drawn.astype(np.uint16), num_supers, bits)
    return cut_classes(order, bounds, entries, limits, edges)
