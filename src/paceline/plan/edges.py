"""Best bucket edges: the exact padding of any cut of the lengths into K buckets, and the cut that pads least.

Inside a bucket a batch takes samples in random order until the next one would exceed the budget at the true running
maximum. With T(c) = the widest padded width of which c samples fit, and T descending in c:

    P(count ≥ c) = π(T(c)) · F(T(c))^(c−1),

F = distribution function of a sample's width in the bucket, π = that of a batch's first sample. The first sample is the
one that overflowed the batch before, so it is biased towards long ones:

    π(y) = F(y) · Σ_c P(count ≥ c) − Σ_c F(min(y, T(c+1))) · π(T(c+1)) · F(T(c+1))^(c−1),

a contraction, iterated to its fixed point. Padded tokens a sample = E[count · width] / E[count] (renewal reward). The
cost of a set of buckets is a sum over them, so a dynamic programme over cut points finds the best K edges exactly
(of up to `MAX_CUTS` distinct widths; of more, it chooses among that many, and single edges are then moved over all).
A budget of draft positions is not part of this model; the last, partly filled batch of a bucket neither.

Shape letters: D distinct padded widths (support of the law), C samples a batch at most, K buckets, I intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import PlanError
from paceline.plan.budget import BatchBudget

MAX_SUPPORT = 256
"""Distinct widths up to which the law is exact; more are grouped (upwards) while edges are chosen."""
MAX_CUTS = 128
"""Distinct widths up to which every one is a possible edge; above, as many spread over them."""
TOLERANCE = 1e-10
"""Change of π at which its iteration stops."""


@dataclass(frozen=True, slots=True)
class Edges:
    """A set of buckets and what it costs.

    Attributes:
        edges: upper ends in tokens, ascending, multiples of the width multiple, int64 [K].
        padded_tokens: predicted for all samples.
        batches: predicted micro-batches of each bucket [K].
    """

    edges: np.ndarray
    padded_tokens: float
    batches: np.ndarray

    @property
    def largest_share(self) -> float:
        """Share of the micro-batches that the largest bucket makes."""
        return float(self.batches.max() / self.batches.sum())


@dataclass(frozen=True, slots=True)
class _Law:
    """Distinct padded widths, ascending, with their counts, and the places (1-based) at which buckets may end."""

    widths: np.ndarray
    counts: np.ndarray
    cuts: np.ndarray

    @classmethod
    def of(cls, histogram: np.ndarray, limits: BatchBudget) -> _Law:
        places = np.flatnonzero(histogram)
        return cls((places + 1) * limits.width_multiple, histogram[places], np.arange(len(places)) + 1)


def best_edges(histogram: np.ndarray, limits: BatchBudget, num_buckets: int) -> Edges:
    """The K edges of least padding.

    Args:
        histogram: samples per padded width: place c counts width (c + 1) · multiple.
        limits: budgets; the widest fits them.
        num_buckets: K.

    Raises:
        PlanError: K is larger than the number of distinct padded widths.
    """
    law = _Law.of(histogram, limits)
    if num_buckets > len(law.widths):
        raise PlanError(
            f"plan.num_buckets {num_buckets} is larger than the {len(law.widths)} distinct widths of the samples "
            f"(multiples of {limits.width_multiple}); ask for at most {len(law.widths)}"
        )
    found = edge_ladder(histogram, limits, num_buckets)[-1]
    if len(law.widths) <= MAX_CUTS:
        return found
    return _polished(law, np.searchsorted(law.widths, found.edges) + 1, limits)


def edge_ladder(histogram: np.ndarray, limits: BatchBudget, most_buckets: int) -> list[Edges]:
    """The best edges for K = 1, 2, ..., ``most_buckets``, or as many as there are widths; arguments as `best_edges`."""
    law = _thinned(_Law.of(histogram, limits))
    padded, batches = interval_costs(law.widths, law.counts, law.cuts, limits)
    return [_assemble(law, padded, batches, chain) for chain in _chains(padded, min(most_buckets, len(law.cuts)))]


def all_distinct(ladder: Sequence[Edges], window_size: int) -> Edges | None:
    """The fewest buckets with which every window of that many batches can hold different ones only; None: none can.

    That is possible where no bucket makes more than 1 / ``window_size`` of the batches.
    """
    return next((made for made in ladder if made.largest_share <= 1 / window_size), None)


def _cost(law: _Law, places: np.ndarray, limits: BatchBudget) -> Edges:
    starts = np.concatenate([np.zeros(1, np.int64), places[:-1]])
    spans = [_bucket(law, int(start), int(stop), limits) for start, stop in zip(starts, places, strict=True)]
    batches = np.array([batches for _, batches in spans])
    return Edges(law.widths[places - 1], sum(padded for padded, _ in spans), batches)


def _bucket(law: _Law, start: int, stop: int, limits: BatchBudget) -> tuple[float, float]:
    padded, batches = _column(law.widths, law.counts, np.array([start]), stop, limits)
    return float(padded[0]), float(batches[0])


def _polished(law: _Law, places: np.ndarray, limits: BatchBudget) -> Edges:
    """Moves single edges over the whole law, in steps that halve down to one width, while that saves padding."""
    ends = [0, *places.tolist()]
    step = max(len(law.widths) // MAX_CUTS, 1)
    while step:
        for number in range(1, len(ends) - 1):
            low, here, high = ends[number - 1 : number + 2]
            costs = {
                place: _bucket(law, low, place, limits)[0] + _bucket(law, place, high, limits)[0]
                for place in (here, here - step, here + step)
                if low < place < high
            }
            ends[number] = min(costs, key=costs.__getitem__)
        step //= 2
    return _cost(law, np.array(ends[1:], np.int64), limits)


def _thinned(law: _Law) -> _Law:
    widths, counts = law.widths, law.counts
    if len(widths) > MAX_SUPPORT:
        ends = _spread(widths, counts, MAX_SUPPORT)
        counts = np.diff(np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)[ends]]))
        widths = widths[ends]
    cuts = np.arange(len(widths)) if len(widths) <= MAX_CUTS else _spread(widths, counts, MAX_CUTS)
    return _Law(widths, counts, cuts + 1)


def _spread(widths: np.ndarray, counts: np.ndarray, most: int) -> np.ndarray:
    """Places of at most ``most`` widths, the last included: half even in width, a quarter each in samples, tokens."""
    steps = np.arange(1, most // 2 + 1)
    chosen = [np.searchsorted(widths, widths[0] + steps * int(widths[-1] - widths[0]) // len(steps))]
    steps = np.arange(1, most // 4 + 1)
    for mass in (counts, counts * widths):
        below = np.cumsum(mass)
        chosen.append(np.searchsorted(below, steps * int(below[-1]) // len(steps)))
    return np.unique(np.concatenate(chosen))


def interval_costs(
    widths: np.ndarray, counts: np.ndarray, cuts: np.ndarray, limits: BatchBudget
) -> tuple[np.ndarray, np.ndarray]:
    """Padded tokens and micro-batches of a bucket over every interval between cuts.

    Args:
        widths, counts: distinct widths, ascending, and how many samples have each [D].
        cuts: places at which a bucket may end, ascending, the last one D [I].
        limits: budgets.

    Returns:
        padded, batches: [I, I]; entry (i, j) is the bucket of places cuts[i-1] to cuts[j] (0 for i = 0); infinity
        below the diagonal.
    """
    starts = np.concatenate([np.zeros(1, np.int64), cuts[:-1]])
    padded = np.full((len(cuts), len(cuts)), np.inf)
    batches = np.full((len(cuts), len(cuts)), np.inf)
    for column, stop in enumerate(cuts.tolist()):
        found = _column(widths, counts, starts[: column + 1], stop, limits)
        padded[: column + 1, column], batches[: column + 1, column] = found
    return padded, batches


def _column(
    widths: np.ndarray, counts: np.ndarray, starts: np.ndarray, stop: int, limits: BatchBudget
) -> tuple[np.ndarray, np.ndarray]:
    """Padded tokens and batches of the buckets from each start to one stop, [I] each."""
    widths = widths[:stop]
    below = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[:stop])]).astype(np.float64)
    samples = below[-1] - below[starts]
    law = np.maximum(below[None, :] - below[starts][:, None], 0.0) / samples[:, None]  # F at place m, [I, D + 1]
    capacities = np.array([limits.capacity(int(width)) for width in widths])
    most = int(capacities.max())
    # T(c) as a place: how many of the widths hold c samples; capacities descend.
    reach = np.searchsorted(-capacities, -np.arange(1, most + 2), side="right")  # c = 1 .. C + 1
    reached = law[:, reach]  # F(T(c)), [I, C + 1]
    powers = reached[:, 1:] ** np.arange(most)[None, :]  # F(T(c+1))^(c−1) for c = 1 .. C
    first = _first_law(reached, powers)  # π(T(c)), [I, C + 1]
    weights = first[:, 1:] * powers  # π(T(c+1)) F(T(c+1))^(c−1), [I, C]
    at_least = first[:, :-1] * reached[:, :-1] ** np.arange(most)[None, :]  # P(count ≥ c), [I, C]
    mean_count = at_least.sum(axis=1)
    reward = _mean_reward(widths, law, reached, reach, weights, mean_count, at_least)
    batches = samples / mean_count
    return batches * reward, batches


def _first_law(reached: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """π at every T(c), [I, C + 1], by iteration from π = F."""
    first = reached.copy()
    exponents = np.arange(reached.shape[1] - 1)[None, :]
    leading = reached[:, :-1] ** exponents
    for _ in range(1000):
        mean_count = (first[:, :-1] * leading).sum(axis=1, keepdims=True)
        weights = first[:, 1:] * powers
        # Σ_c F(min(T(k), T(c+1))) · weight(c): F(T(k)) while c + 1 ≤ k, F(T(c+1)) beyond.
        inside = np.concatenate([np.zeros_like(mean_count), np.cumsum(weights, axis=1)], axis=1)
        scaled = weights * reached[:, 1:]
        beyond = np.concatenate([np.cumsum(scaled[:, ::-1], axis=1)[:, ::-1], np.zeros_like(mean_count)], axis=1)
        renewed = reached * mean_count - reached * inside - beyond
        change = float(np.abs(renewed - first).max())
        first = renewed
        if change < TOLERANCE:
            return first
    raise PlanError("the best edges did not converge; please give plan.edges yourself")


def _mean_reward(
    widths: np.ndarray,
    law: np.ndarray,
    reached: np.ndarray,
    reach: np.ndarray,
    weights: np.ndarray,
    mean_count: np.ndarray,
    at_least: np.ndarray,
) -> np.ndarray:
    """E[count · width] of a batch, [I].

    P(count = c, width ≤ w) = H(c, min(w, T(c))) − H(c, min(w, T(c+1))) · F(T(c+1)) with H(c, y) = π(y) · F(y)^(c−1);
    the mean follows by summation by parts over the steps between widths.
    """
    num_places, most = law.shape[1], at_least.shape[1]
    # π at every place: Σ_c F(min(m, T(c+1))) · weight(c) splits at the c whose T(c+1) passes place m.
    scaled = weights * reached[:, 1:]
    inside = np.concatenate([np.zeros((len(law), 1)), np.cumsum(weights, axis=1)], axis=1)
    beyond = np.concatenate([np.cumsum(scaled[:, ::-1], axis=1)[:, ::-1], np.zeros((len(law), 1))], axis=1)
    passing = np.searchsorted(-reach[1:], -np.arange(num_places), side="right")  # c with T(c+1) ≥ place m
    first = law * mean_count[:, None] - law * inside[:, passing] - beyond[:, passing]
    steps = np.diff(widths, append=widths[-1])  # w(m+1) − w(m), [D]
    reward = np.zeros(len(law))
    power = np.ones_like(law)
    for count in range(1, most + 1):
        held = first * power  # H(c, m), [I, D + 1]
        here, above = reach[count - 1], reach[count]
        if not here:
            break
        places = np.arange(1, num_places)
        found = held[:, np.minimum(places, here)]
        found -= held[:, np.minimum(places, above)] * reached[:, count][:, None]
        reward += count * (found[:, -1] * widths[-1] - (found * steps[None, :]).sum(axis=1))
        power *= law
    return reward


def _chains(padded: np.ndarray, most_buckets: int) -> list[list[int]]:
    """For K = 1 .. ``most_buckets`` the cut numbers at which the best K buckets end (dynamic programme)."""
    num_cuts = len(padded)
    best = padded[0].copy()
    parents: list[np.ndarray] = []
    chains = [[num_cuts - 1]]
    for _ in range(1, most_buckets):
        # A bucket may start after cut i − 1, so its row is i; the buckets before it end at cut i − 1.
        total = np.full((num_cuts, num_cuts), np.inf)
        total[1:] = best[:-1, None] + padded[1:]
        parents.append(total.argmin(axis=0) - 1)
        best = total.min(axis=0)
        chain = [num_cuts - 1]
        for parent in reversed(parents):
            chain.append(int(parent[chain[-1]]))
        chains.append(chain[::-1])
    return chains


def _assemble(law: _Law, padded: np.ndarray, batches: np.ndarray, chain: list[int]) -> Edges:
    starts = [0] + [cut + 1 for cut in chain[:-1]]
    edges = law.widths[law.cuts[chain] - 1].astype(np.int64)
    return Edges(edges, float(padded[starts, chain].sum()), batches[starts, chain])
