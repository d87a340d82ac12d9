"""Shape grid: a fresh random order inside every fine length class, one class after the other.

The classes are the padded widths (multiples of ``width_multiple``), so that padding is what rounding costs and nothing
more. What is left of a class flows into the next longer one: no partial batch but where a budget demands it. In a small
data set a class may hold no more than a batch or two, and the same samples would meet again every epoch: so
neighbouring widths share a class until it fills ``grid_class_batches`` batches.
"""

from __future__ import annotations

import numpy as np

from paceline.config.plan import PlanConfig
from paceline.plan.composition import Composition, class_composition
from paceline.plan.intake import Entries
from paceline.plan.keys import class_order, random_order
from paceline.plan.limits import Limits


def compose(entries: Entries, limits: Limits, settings: PlanConfig, bits: np.random.BitGenerator) -> Composition:
    """Micro-batches of one epoch; see the registry for the signature."""
    q = limits.width_multiple
    num_classes = -(-entries.longest // q)
    classes = width_classes(entries.lengths, q, num_classes)
    order, bounds = class_order(classes, num_classes, bits)
    entries.know_histogram(np.diff(bounds))
    tops = class_tops(entries.histogram, limits, settings.grid_class_batches)
    if len(tops) == num_classes:
        return class_composition(order, bounds, np.arange(1, num_classes + 1) * q, limits, entries.drafts)
    ends = np.concatenate([np.zeros(1, np.int64), bounds[tops + 1]])
    widest = np.diff(tops, prepend=-1) > 1
    for start, stop in zip(ends[:-1][widest].tolist(), ends[1:][widest].tolist(), strict=True):
        order[start:stop] = order[start:stop][random_order(bits, stop - start)]
    made = class_composition(order, ends, (tops + 1) * q, limits, entries.drafts)
    longest = np.maximum.reduceat(classes[order], made.offsets[:-1]).astype(np.int32)
    return Composition(made.order, made.offsets, (longest + 1) * np.int32(q))


def class_tops(histogram: np.ndarray, limits: Limits, class_batches: int) -> np.ndarray:
    """Widest width class of every grid class, ascending, int64: merged from below until ``class_batches`` are filled.

    Args:
        histogram: entries per padded width.
        limits: budgets, for the samples a batch holds.
        class_batches: batches that a grid class fills at least; what is too little at the end joins the last class.
    """
    held, tops = 0, []
    widths = np.arange(1, len(histogram) + 1, dtype=np.int64) * limits.width_multiple
    for place in np.flatnonzero(histogram).tolist():
        held += int(histogram[place])
        if held >= class_batches * limits.capacity(int(widths[place])):
            tops.append(place)
            held = 0
    if held or not tops:
        tops[-1:] = [len(histogram) - 1]
    filled = np.array(tops, np.int64)
    if class_batches == 1 or len(filled) == np.count_nonzero(histogram):
        return np.arange(len(histogram), dtype=np.int64)
    return filled


def width_classes(lengths: np.ndarray, q: int, num_classes: int) -> np.ndarray:
    """⌈length / q⌉ − 1 of each entry in the smallest unsigned type, without wide temporaries."""
    longest = num_classes * q
    narrow = np.uint16 if longest < 2**16 else np.uint32 if longest < 2**32 else np.uint64
    classes = lengths.astype(narrow)
    classes -= narrow(1)
    if q > 1:
        classes //= narrow(q)
    return classes.astype(np.uint8) if num_classes <= 256 else classes
