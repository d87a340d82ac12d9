"""Packed: documents in random order into bins of ``token_budget`` real tokens, for forwards that keep them apart.

Best fit sample by sample is slow, so bins are filled in generations. A generation opens many bins at once; in rounds,
each open bin takes the next sample in random order and closes at the first one that does not fit. Then every gap
takes the longest sample among all those still waiting that fits (best fit, from the other side), up to three times. As
many samples wait, hardly a gap stays. The next generation packs what is left; the last few thousand samples, and small
data sets as a whole, are packed by best fit in random order.

A bin's padded size is the whole budget. Draft positions and ``max_samples`` bound a bin as they bound any batch.

Shape letters: E entries, N bins, P waiting entries.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.batches import Batches, composed
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import Entries
from paceline.plan.rng import ascending, class_order, index_dtype, random_order

SMALL = 4096
"""Samples that best fit handles one by one."""
GENERATION = 0.8
"""Share of the bins still needed that one generation fills; the others' samples are there to choose from."""
TOP_UPS = 3
"""Fillers for a gap at most."""


@dataclass(slots=True)
class _Samples:
    """Entries in random order: their sizes, draft positions (or None), and the bin each one got."""

    sizes: np.ndarray
    drafts: np.ndarray | None
    bins: np.ndarray


@dataclass(slots=True)
class _Bins:
    """Bins of one generation: room in tokens, in samples and in draft positions, int64 [N] each."""

    first: int
    room: np.ndarray
    places: np.ndarray
    draft_room: np.ndarray


def compose(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Bins of one epoch; see the registry for the signature."""
    shuffle = random_order(bits, entries.count)
    lengths = entries.lengths.take(shuffle)
    sizes = lengths.astype(np.int32 if limits.token_budget < 2**31 else np.int64)
    if limits.attention_length is not None:
        wide = sizes.astype(np.int64)
        sizes = wide - (-wide * wide // limits.attention_length)
    drafts = entries.drafts(shuffle, lengths)
    samples = _Samples(sizes, drafts, np.empty(entries.count, np.int32))
    waiting = np.arange(entries.count, dtype=index_dtype(entries.count))
    num_bins = 0
    while len(waiting) > SMALL:
        wanted = int(sizes[waiting].sum(dtype=np.int64) // limits.token_budget * GENERATION)
        if wanted < 1:
            break
        waiting = _generation(samples, waiting, num_bins, wanted, limits)
        num_bins += wanted
    num_bins = _best_fit(samples, np.sort(waiting), num_bins, limits)
    order, bounds = class_order(samples.bins.astype(np.uint32), num_bins, None)
    return composed(shuffle[order], bounds, lengths[order], limits, packed=True)


def _generation(samples: _Samples, waiting: np.ndarray, first: int, wanted: int, limits: BatchBudget) -> np.ndarray:
    """Fills ``wanted`` bins numbered from ``first``; returns the entries that still wait."""
    bins = _Bins(
        first,
        np.full(wanted, limits.token_budget, np.int64),
        np.full(wanted, limits.max_samples, np.int64),
        np.full(wanted, limits.draft_limit, np.int64),
    )
    open_bins = np.arange(wanted)
    refused, cursor = [], 0
    while len(open_bins) and cursor < len(waiting):
        takers = open_bins[: len(waiting) - cursor]
        offered = waiting[cursor : cursor + len(takers)]
        cursor += len(takers)
        fits = _fits(samples, offered, bins, takers)
        _put(samples, offered[fits], bins, takers[fits])
        refused.append(offered[~fits])
        open_bins = np.concatenate([takers[fits], open_bins[len(takers) :]])
    waiting = np.concatenate([*refused, waiting[cursor:]])
    for _ in range(TOP_UPS):
        waiting = _top_up(samples, waiting, bins)
    return waiting


def _fits(samples: _Samples, offered: np.ndarray, bins: _Bins, takers: np.ndarray) -> np.ndarray:
    fits = (samples.sizes[offered] <= bins.room[takers]) & (bins.places[takers] > 0)
    if samples.drafts is not None:
        fits &= samples.drafts[offered] <= bins.draft_room[takers]
    return fits


def _put(samples: _Samples, chosen: np.ndarray, bins: _Bins, takers: np.ndarray) -> None:
    bins.room[takers] -= samples.sizes[chosen]
    bins.places[takers] -= 1
    if samples.drafts is not None:
        bins.draft_room[takers] -= samples.drafts[chosen]
    samples.bins[chosen] = takers + bins.first


def _top_up(samples: _Samples, waiting: np.ndarray, bins: _Bins) -> np.ndarray:
    """Every bin takes the longest waiting entry that fits; returns the entries that still wait."""
    takers = np.flatnonzero((bins.places > 0) & (bins.room > 0))
    if not len(waiting) or not len(takers):
        return waiting
    items, who = match_gaps(bins.room[takers], samples.sizes[waiting])
    chosen, takers = waiting[items], takers[who]
    if samples.drafts is not None:
        fits = _fits(samples, chosen, bins, takers)
        items, chosen, takers = items[fits], chosen[fits], takers[fits]
    _put(samples, chosen, bins, takers)
    left = np.ones(len(waiting), bool)
    left[items] = False
    return waiting[left]


def match_gaps(gaps: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The widest gap takes the longest item that fits, then the next gap the longest that is left, and so on.

    With D(v) gaps of at least v and S(v) items of exactly v, the items of at least v that find a gap number
    A(v) = min(D(v), A(v + 1) + S(v)): a running minimum, so no loop over gaps is needed.

    Args:
        gaps: room of each bin, integers ≥ 1 [N].
        sizes: size of each item, integers ≥ 1 [P].

    Returns:
        Chosen items and the gap each one fills, int64, longest first; equal sizes and gaps go in their given order.
    """
    top = int(sizes.max())
    clipped = np.minimum(gaps, top)
    supply = np.bincount(sizes, minlength=top + 1)
    supply_from = np.cumsum(supply[::-1])[::-1]
    demand_from = np.cumsum(np.bincount(clipped, minlength=top + 1)[::-1])[::-1]
    shortfall = np.minimum.accumulate((demand_from - supply_from)[::-1])[::-1]
    matched_from = supply_from + np.minimum(shortfall, 0)
    matched = np.diff(matched_from, append=0) * -1
    matched[0] = 0
    total = int(matched.sum())
    by_size = ascending(sizes)
    starts = np.cumsum(supply) - supply
    sized = np.flatnonzero(matched)[::-1]
    counts = matched[sized]
    ends = np.cumsum(counts)
    within = np.arange(total) - np.repeat(ends - counts, counts)
    items = by_size[np.repeat(starts[sized], counts) + within]
    who = ascending(top - clipped)[:total]
    return items.astype(np.int64), who.astype(np.int64)


def _best_fit(samples: _Samples, waiting: np.ndarray, first: int, limits: BatchBudget) -> int:
    """Each entry goes into the fullest bin that takes it, or opens one; returns the number of bins afterwards."""
    rooms: list[tuple[int, int]] = []  # ascending (room, bin) of the bins that may still take something
    places: dict[int, int] = {}
    draft_room: dict[int, int] = {}
    drafts = samples.drafts
    num_bins = first
    for entry in waiting.tolist():
        size = int(samples.sizes[entry])
        draft = int(drafts[entry]) if drafts is not None else 0
        at = bisect_left(rooms, (size, -1))
        while at < len(rooms) and draft_room[rooms[at][1]] < draft:
            at += 1
        if at < len(rooms):
            room, number = rooms.pop(at)
        else:
            room, number = limits.token_budget, num_bins
            places[number], draft_room[number] = limits.max_samples, limits.draft_limit
            num_bins += 1
        samples.bins[entry] = number
        places[number] -= 1
        draft_room[number] -= draft
        if places[number] and room > size:
            insort(rooms, (room - size, number))
    return num_bins
