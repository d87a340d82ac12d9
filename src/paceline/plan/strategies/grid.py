"""Shape grid: a fresh random order inside every fine length class, one class after the other.

The classes are the padded widths (multiples of ``width_multiple``), so that padding is what rounding costs and nothing
more. What is left of a class flows into the next longer one: no partial batch but where a budget demands it. In a small
data set a class may hold no more than a batch or two, and the same samples would meet again every epoch: of a class of
n batches, about 1 / n of the batch-mates. So neighbouring widths share a class where that is needed: the classes are
those of least padding with which at most 1 / ``grid_class_batches`` of all batch-mates meet again.

Two limits hold however small the data set is. Cut the samples in order of length, as ``sorted`` does. A joint class
needs at most one batch more than that makes of its widths, and at most `MOST_GROWTH` times their padded tokens. Every
class cut by itself is one way to cut the epoch, and the cut made here is the shortest: so an epoch has at most as many
batches as ``sorted`` and one more for every joint class (draft positions aside).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.batches import Batches, class_composition, composed, cut_runs
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import Entries
from paceline.plan.rng import as_index, chunks, fits_word, random_order, sorted_words

MOST_GROWTH = 1.2
"""Padded tokens of a joint class over those of its parts, at most."""
MOST_JOINED = 64
"""Widths of a joint class at most, and batches as a multiple of ``grid_class_batches``."""
LEAST_PRICE = 0.05
"""Padded tokens, as a share of a class's, that it is worth to part all batch-mates even where few of all meet again: a
batch that is the same in every epoch is joined with its neighbors where their widths are near."""
SEARCH_STEPS = 12
"""Halvings of the range in which the price of a meeting is searched."""


@dataclass(frozen=True, slots=True)
class GridClasses:
    """Classes as stretches of the samples in order of width, shortest first.

    Attributes:
        ends: class c is the samples ``ends[c]`` to ``ends[c + 1]``, int64 [C + 1].
        widths: widest padded width of each class, int64 [C].
        joint: whether a class joins the batches of several widths, bool [C].
    """

    ends: np.ndarray
    widths: np.ndarray
    joint: np.ndarray


def compose(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Micro-batches of one epoch; see the registry for the signature."""
    q, count = limits.width_multiple, entries.count
    num_classes = -(-entries.longest // q)
    note_bits = (q - 1).bit_length() if fits_word(count, (q - 1).bit_length()) else 0
    describe = _widths_and_rests(entries.lengths, q, num_classes, with_rests=note_bits > 0)
    words, bounds = sorted_words(count, describe, num_classes, bits, note_bits)
    entries.know_histogram(np.diff(bounds))
    widths = np.arange(1, num_classes + 1, dtype=np.int64) * q
    made = grid_classes(bounds, widths, limits, settings.grid_class_batches)
    lengths = None
    if made.joint.any() or settings.draft_position_budget is not None:
        lengths = _sorted_lengths(words, bounds, entries.lengths, q, note_bits)
    words >>= np.uint32(note_bits)
    order = as_index(words, count)
    if lengths is None or not made.joint.any():
        return class_composition(order, bounds, widths, limits, entries.drafts(order, lengths))
    for start, stop in zip(made.ends[:-1][made.joint].tolist(), made.ends[1:][made.joint].tolist(), strict=True):
        shuffled = random_order(bits, stop - start)
        order[start:stop] = order[start:stop][shuffled]
        lengths[start:stop] = lengths[start:stop][shuffled]
    offsets = cut_runs(made.ends, made.widths, limits, entries.drafts(order, lengths))
    return composed(order, offsets, lengths, limits)


def _widths_and_rests(
    lengths: np.ndarray, q: int, num_classes: int, *, with_rests: bool
) -> Callable[[slice], tuple[np.ndarray, np.ndarray | None]]:
    """Width class (⌈length / q⌉ − 1) of a range of entries, and what rounding adds to each, in small types."""
    narrow = _narrow(num_classes * q)

    def describe(part: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Classes and rests of a range of entries."""
        below = lengths[part].astype(narrow)
        below -= narrow(1)
        classes = below // narrow(q)
        if not with_rests:
            return classes, None
        below -= classes * narrow(q)
        return classes, narrow(q - 1) - below

    return describe


def _sorted_lengths(words: np.ndarray, bounds: np.ndarray, lengths: np.ndarray, q: int, note_bits: int) -> np.ndarray:
    """Lengths in sorted order [E]: the width less what rounding added, which travelled along, or else looked up."""
    if not note_bits:
        return lengths.take(words)
    narrow, mask = _narrow((len(bounds) - 1) * q), np.uint32((1 << note_bits) - 1)
    found = np.repeat((np.arange(1, len(bounds)) * q).astype(narrow), np.diff(bounds))
    for part in chunks(len(words)):
        found[part] -= (words[part] & mask).astype(narrow)
    return found


def _narrow(top: int) -> type[np.unsignedinteger]:
    """Smallest type for whole numbers up to ``top``."""
    return np.uint16 if top < 2**16 else np.uint32 if top < 2**32 else np.uint64


def grid_classes(bounds: np.ndarray, widths: np.ndarray, limits: BatchBudget, class_batches: int) -> GridClasses:
    """The classes of least padding with which at most 1 / ``class_batches`` of all batch-mates meet again.

    Each meeting has a price in padded tokens. For one price, the best classes follow from a dynamic programme over
    their ends; the lowest price that keeps the share is found by halving. Where no price does, the highest counts.

    Args:
        bounds: width w is the samples ``bounds[w]`` to ``bounds[w + 1]``, int64 [widths + 1].
        widths: padded widths, ascending.
        limits: budgets, for the samples a batch holds.
        class_batches: the reciprocal of the largest share of batch-mates that should meet again.
    """
    sizes, own, batches, starts = width_parts(bounds, widths, limits)
    costs, met, mates = joint_costs(sizes, own, batches, limits, MOST_JOINED * class_batches)
    joined, low, high = _cheapest(costs), 0.0, 2.0 * float(own[-1])
    if _total(met, joined) * class_batches > mates:
        joined = _cheapest(costs + high * met)
        for _ in range(SEARCH_STEPS):
            price = (low + high) / 2
            tried = _cheapest(costs + price * met)
            if _total(met, tried) * class_batches <= mates:
                joined, high = tried, price
            else:
                low = price
    stops = _stops(joined)
    return GridClasses(np.append(0, starts[stops]), own[stops - 1], joined[stops - 1] > 1)


def width_parts(
    bounds: np.ndarray, widths: np.ndarray, limits: BatchBudget
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The batches of every width when samples are cut in order of length; arguments as for `grid_classes`.

    Returns:
        Samples, padded width and batches of each part, and the first sample of each with the end of the last.
    """
    offsets = cut_runs(bounds, widths, limits, None)
    top = np.searchsorted(bounds, offsets[1:] - 1, side="right") - 1
    first = np.flatnonzero(np.diff(top, prepend=-1))
    starts = np.append(offsets[first], offsets[-1])
    return np.diff(starts), widths[top[first]], np.diff(first, append=len(top)), starts


def joint_costs(
    sizes: np.ndarray, own: np.ndarray, batches: np.ndarray, limits: BatchBudget, most_batches: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """What classes cost: entry (p, n) is the class of part p and the n parts before it, [parts, `MOST_JOINED`].

    Args:
        sizes, own, batches: samples, padded width and batches of each part [parts].
        limits: budgets.
        most_batches: of a joint class.

    Returns:
        costs: padded tokens over those of the parts, and the least price of meeting again; infinite where a class is
            not allowed.
        met: pairs of batch-mates that meet again.
        mates: all pairs of batch-mates.
    """

    def of_class(values: np.ndarray) -> np.ndarray:
        below = np.append(0, np.cumsum(values))
        return below[1:, None] - below[np.maximum(starts, 0)]

    starts = np.arange(len(own))[:, None] - np.arange(min(MOST_JOINED, len(own)))
    capacity = np.array([limits.capacity(width) for width in own.tolist()])[:, None]
    held, had, padded, mates = (of_class(of) for of in (sizes, batches, sizes * own, sizes * (sizes / batches - 1)))
    joint = held * own[:, None]
    allowed = (-(-held // capacity) <= had + 1) & (joint <= MOST_GROWTH * padded) & (had <= most_batches)
    allowed[:, 0] = True
    count = np.maximum(held / capacity, 1.0)
    count[:, 0] = batches
    costs = np.where(allowed & (starts >= 0), joint - padded + LEAST_PRICE * padded / count, np.inf)
    return costs, mates / count, float(mates[:, 0].sum())


def _cheapest(costs: np.ndarray) -> np.ndarray:
    """Parts of the class that ends with each part, in the cheapest division of all parts up to it, int64 [parts]."""
    count, most = costs.shape
    best = np.full(most + count, np.inf)
    best[most - 1] = 0.0  # of no part
    joined = np.empty(count, np.int64)
    for part, row in enumerate(costs):
        total = best[part : part + most][::-1] + row
        joined[part] = total.argmin()
        best[part + most] = total[joined[part]]
    return joined + 1


def _stops(joined: np.ndarray) -> np.ndarray:
    """Ends of the classes, ascending, int64."""
    stops = [len(joined)]
    while stops[-1] > joined[stops[-1] - 1]:
        stops.append(stops[-1] - int(joined[stops[-1] - 1]))
    return np.array(stops[::-1])


def _total(values: np.ndarray, joined: np.ndarray) -> float:
    """Sum of a table of `joint_costs` over the classes of a division."""
    last = _stops(joined) - 1
    return float(values[last, joined[last] - 1].sum())
