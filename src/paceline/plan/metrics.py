"""What a plan does to training, measured on the plan itself.

Shape letters: M micro-batches in training order, W windows, G batches a window, K buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.epoch import EpochPlan


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Totals of each micro-batch in training order, int64 [M] each."""

    samples: np.ndarray
    real_tokens: np.ndarray
    padded_tokens: np.ndarray
    anchors: np.ndarray


@dataclass(frozen=True, slots=True)
class Repeats:
    """How the buckets are spread over the windows of an epoch.

    Attributes:
        crowded: share of the whole windows in which one bucket makes at least three quarters of the batches (3 of 4).
        crowded_last_tenth: the same over the last tenth of the windows.
        mean_distinct: distinct buckets of a window on average.
        distinct_bound: what no order can exceed, Σ_b min(1, G · share of bucket b).
        longest_run: most batches of one bucket in direct succession.
    """

    crowded: float
    crowded_last_tenth: float
    mean_distinct: float
    distinct_bound: float
    longest_run: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What a longest length would keep: samples and tokens (supervised ones where they are known), and their shares."""

    max_length: int
    samples: int
    tokens: int
    share_samples: float
    share_tokens: float


def kept_by_length(
    lengths: np.ndarray, tokens: np.ndarray, limits: Sequence[int] = (2048, 4096, 8192, 16384)
) -> list[Kept]:
    """What each longest length would keep; those at or above the longest sample are left out but for the first.

    Args:
        lengths: of every row [N].
        tokens: what is counted of every row: supervised tokens, or the lengths again [N].
        limits: longest lengths, ascending.
    """
    total, found = max(int(tokens.sum(dtype=np.int64)), 1), []
    for limit in limits:
        fits = lengths <= limit
        samples, held = int(np.count_nonzero(fits)), int(tokens[fits].sum(dtype=np.int64))
        found.append(Kept(limit, samples, held, samples / len(lengths), held / total))
        if samples == len(lengths):
            break
    return found


def batch_totals(plan: EpochPlan) -> BatchTotals:
    """Samples, tokens and anchors of each micro-batch."""
    rows, starts = plan.batches.order, plan.batches.offsets[:-1]
    real = np.add.reduceat(plan.lengths[rows], starts, dtype=np.int64)[plan.sequence]
    anchors = np.add.reduceat(plan.given.anchors_of(rows), starts)[plan.sequence]
    padded = plan.counts * plan.widths.astype(np.int64)
    if plan.batches.packed:
        padded = np.full(plan.num_batches, plan.settings.token_budget, np.int64)
    return BatchTotals(plan.counts, real, padded, anchors)


def whole_windows(plan: EpochPlan, values: np.ndarray) -> np.ndarray:
    """Values of the batches by window, [W, G]; a short window is left out."""
    whole = plan.num_batches // plan.window_size
    return values[: whole * plan.window_size].reshape(whole, plan.window_size)


def repeats(plan: EpochPlan) -> Repeats:
    """How the buckets are spread over the windows; NaN where there is no whole window or a window is one batch."""
    windows = whole_windows(plan, plan.buckets).astype(np.int64)
    count, size = windows.shape
    run = longest_run(plan.buckets)
    if not count or size == 1:
        return Repeats(float("nan"), float("nan"), float("nan"), float("nan"), run)
    num_buckets = len(plan.edges)
    flat = windows + np.arange(count)[:, None] * num_buckets
    counts = np.bincount(flat.ravel(), minlength=count * num_buckets).reshape(count, num_buckets)
    crowded = counts.max(axis=1) * 4 >= 3 * size
    last = max(count // 10, 1)
    shares = counts.sum(axis=0) / windows.size
    return Repeats(
        crowded=float(crowded.mean()),
        crowded_last_tenth=float(crowded[-last:].mean()),
        mean_distinct=float((counts > 0).sum(axis=1).mean()),
        distinct_bound=float(np.minimum(1.0, size * shares).sum()),
        longest_run=run,
    )


def longest_run(values: np.ndarray) -> int:
    """Most equal values in direct succession; 0 for none."""
    if not len(values):
        return 0
    changes = np.flatnonzero(np.diff(values.astype(np.int64)))
    borders = np.concatenate([np.array([-1]), changes, np.array([len(values) - 1])])
    return int(np.diff(borders).max())


def mean_slots(eligible: np.ndarray, block_size: int) -> np.ndarray:
    """Supervised slots of one anchor on average, float64, same shape.

    An anchor d places before the end of a supervised stretch of e eligible positions supervises min(block − 1, d)
    slots; this is the mean over d = 1 .. e. The stretch is taken to be one piece: an upper bound for answers in parts.
    """
    drafts = block_size - 1
    count = np.maximum(eligible, 1).astype(np.float64)
    inside = np.minimum(count, drafts)
    return (inside * (inside + 1) / 2 + (count - inside) * drafts) / count


def sample_weights(plan: EpochPlan, rows: np.ndarray, weighting: str) -> np.ndarray:
    """What each row weighs in the loss of its window, float64, same shape.

    ``token``: its supervised slots, anchors × slots of one on average, before any decay over the slots; ``anchor``: its
    anchors; ``sample``: 1.
    """
    if weighting == "sample":
        return np.ones(len(rows))
    anchors = plan.given.anchors_of(rows).astype(np.float64)
    return (
        anchors * mean_slots(plan.given.eligible_of(rows), plan.given.block_size) if weighting == "token" else anchors
    )


def weighted_means(plan: EpochPlan, weighting: str) -> tuple[np.ndarray, float]:
    """Σ weight · length / Σ weight of each whole window, float64 [W], and of the whole epoch, in tokens.

    Weights as in the loss: so the standard deviation over windows, times the slope of a loss that is linear in length,
    is the length-driven part of the step-to-step noise.
    """
    rows, starts = plan.batches.order, plan.batches.offsets[:-1]
    weights = sample_weights(plan, rows, weighting)
    weight = np.add.reduceat(weights, starts)[plan.sequence]
    weighted = np.add.reduceat(weights * plan.lengths[rows], starts)[plan.sequence]
    total, sums = float(weight.sum()), whole_windows(plan, weight).sum(axis=1)
    means = whole_windows(plan, weighted).sum(axis=1)[sums > 0] / sums[sums > 0]
    return means, float(weighted.sum()) / total if total else float("nan")


def step_deviation(plan: EpochPlan, totals: BatchTotals) -> float:
    """Standard deviation over whole windows of the plain mean of their batches' mean sample lengths, in tokens.

    This is what a trainer sees that averages batches as equals; for paceline's own loss see `weighted_means`.
    """
    windows = whole_windows(plan, totals.real_tokens / totals.samples)
    return float(windows.mean(axis=1).std()) if len(windows) else float("nan")


def cost_spread(plan: EpochPlan, totals: BatchTotals) -> float:
    """Largest over mean padded work of the replicas' shares of a window, averaged over whole windows; 1 is even."""
    windows = whole_windows(plan, totals.padded_tokens)
    if not len(windows):
        return float("nan")
    shares = windows.reshape(len(windows), plan.settings.accumulate, plan.given.replicas).sum(axis=1)
    return float((shares.max(axis=1) / shares.mean(axis=1)).mean())


def repairing(first: EpochPlan, second: EpochPlan) -> float:
    """Share of the pairs of batch-mates of one plan that are batch-mates in the other as well; NaN without pairs.

    Rows that occur more than once count with their last batch.
    """
    batch_of = np.full(len(second.lengths), -1, np.int64)
    batch_of[second.batches.order] = np.repeat(np.arange(second.batches.num_batches), np.diff(second.batches.offsets))
    sizes = np.diff(first.batches.offsets).astype(np.int64)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    pairs = int((sizes * (sizes - 1) // 2).sum())
    if not pairs:
        return float("nan")
    met = batch_of[first.batches.order]
    keys = np.sort((owner * (second.batches.num_batches + 1) + met + 1)[met >= 0])
    borders = np.concatenate([np.array([-1]), np.flatnonzero(np.diff(keys)), np.array([len(keys) - 1])])
    together = np.diff(borders)
    return float((together * (together - 1) // 2).sum() / pairs)
