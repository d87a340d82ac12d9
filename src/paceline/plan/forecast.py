"""What a plan promises: padding, buckets, windows, steps, time, and in words what a person should look at.

Shape letters: E entries, M micro-batches, K buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.entries import Groups, draft_positions, eligible_counts
from paceline.plan.epoch import EpochPlan, plan_epoch
from paceline.plan.metrics import (
    BatchTotals,
    Repeats,
    batch_totals,
    cost_spread,
    lag_correlation,
    mean_slots,
    repairing,
    repeats,
    step_deviation,
    weighted_means,
    whole_windows,
)

Weighting = Literal["token", "anchor", "sample"]

BATCHES_OVER_SAMPLES = 1.5
"""A bucket whose share of the batches exceeds its share of the samples by this factor is named in a warning."""
QUANTILES = (0, 10, 25, 50, 75, 90, 95, 99, 100)
"""Percentiles of the lengths that a forecast gives."""


@dataclass(frozen=True, slots=True)
class BucketForecast:
    """One bucket of the plan: samples by their own length, batches by the bucket they belong to.

    Attributes:
        low, high: its lengths, both included.
        samples, batches, real_tokens, anchors: totals.
        share_samples, share_batches, share_tokens: of the epoch's totals.
        share_weight: weighting (token, anchor, sample) → share of the loss weight that its samples carry;
            ``batch_mean`` is what averaging batches as equals would give it.
        efficiency: real / padded tokens of its batches; NaN without any.
    """

    low: int
    high: int
    samples: int
    batches: int
    real_tokens: int
    anchors: int
    share_samples: float
    share_batches: float
    share_tokens: float
    share_weight: dict[str, float]
    efficiency: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Everything `paceline plan` shows of one strategy and schedule.

    Attributes:
        strategy, schedule: names.
        replicas, accumulate: shape of a window.
        num_rows: samples given; num_samples: planned in one epoch, repeats counted.
        left_out, kept_over_length: what the epoch does not hold, by reason; over-length samples planned all the same.
        quantiles: percentile → length of the planned samples.
        num_batches, num_windows, short_window: of one epoch; batches of the short window, 0 when there is none.
        carried_out: samples handed on to the next epoch.
        real_tokens, padded_tokens, efficiency: of one epoch.
        draft_positions: of one epoch.
        shapes, widths: distinct (samples, width) and distinct widths.
        buckets: per bucket.
        repeats: buckets in windows; None for strategies whose batches mix all lengths.
        weighting: what counts equally in the loss of a step: token, anchor or sample.
        step_deviation_tokens, mean_tokens: standard deviation over windows, and mean over the epoch, of the sample
            length, each sample weighing what it weighs in the loss.
        batch_mean_deviation_tokens: standard deviation over windows of the plain mean of their batches' mean lengths,
            as a trainer that averages batches as equals would see it.
        lag_correlation: of successive windows' mean length.
        cost_spread: largest over mean work of the replicas in a window.
        repairing: share of batch-mates that meet again in the next epoch.
        epochs, total_windows: optimizer steps of a run of that many epochs, counted epoch by epoch.
        seconds: for the run at the given speed; None without one.
        warnings: sentences.
    """

    strategy: str
    schedule: str
    replicas: int
    accumulate: int
    num_rows: int
    num_samples: int
    left_out: dict[str, int]
    kept_over_length: int
    quantiles: dict[str, int]
    num_batches: int
    num_windows: int
    short_window: int
    carried_out: int
    real_tokens: int
    padded_tokens: int
    efficiency: float
    draft_positions: int
    shapes: int
    widths: int
    buckets: list[BucketForecast]
    repeats: Repeats | None
    weighting: Weighting
    step_deviation_tokens: float
    mean_tokens: float
    batch_mean_deviation_tokens: float
    lag_correlation: float
    cost_spread: float
    repairing: float
    epochs: int
    total_windows: int
    seconds: float | None
    fingerprint: str
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The forecast as plain values for JSON; numbers that do not exist are None."""
        return _plain(asdict(self))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and value != value else value


def forecast(
    lengths: np.ndarray | Sequence[int],
    eligible: np.ndarray | Sequence[int] | None,
    settings: PlanConfig,
    *,
    num_anchors: int,
    block_size: int,
    replicas: int = 1,
    seed: int = 0,
    epochs: int = 1,
    padded_tokens_per_s: float | None = None,
    groups: Groups | None = None,
    weighting: Weighting = "token",
) -> Forecast:
    """Plans the first two epochs (and counts the others) and measures what they promise.

    Args:
        lengths, eligible, settings, num_anchors, block_size, replicas, seed, groups: as for `plan_epoch`.
        epochs: length of the run.
        padded_tokens_per_s: measured speed of the pipeline, for an estimate of the time.
        weighting: of the objective: what counts equally in the loss of a step.

    Raises:
        PlanError: as `plan_epoch`.
    """

    def plan(epoch: int) -> EpochPlan:
        """The plan of one epoch."""
        return plan_epoch(
            lengths,
            eligible,
            settings,
            num_anchors=num_anchors,
            block_size=block_size,
            replicas=replicas,
            seed=seed,
            epoch=epoch,
            groups=groups,
        )

    first = plan(0)
    later = [plan(epoch).num_windows for epoch in range(2, epochs)]
    return describe(first, plan(1), later, epochs, padded_tokens_per_s, weighting=weighting)


def describe(
    first: EpochPlan,
    second: EpochPlan,
    later_windows: Sequence[int],
    epochs: int,
    padded_tokens_per_s: float | None = None,
    *,
    repaired: float | None = None,
    weighting: Weighting = "token",
) -> Forecast:
    """The forecast of a run from its first two plans and the number of windows of each later epoch.

    ``repaired`` is the re-pairing of the two where it is known already: it does not depend on the schedule.
    """
    totals = batch_totals(first)
    settings = first.settings
    padded = int(totals.padded_tokens.sum())
    real = int(totals.real_tokens.sum())
    planned = np.sort(_planned_lengths(first))
    steps, mean = weighted_means(first, weighting)
    mixing = first.composition.packed or settings.strategy == "shuffled"
    made = Forecast(
        strategy=settings.strategy,
        schedule=settings.schedule,
        replicas=first.replicas,
        accumulate=settings.accumulate,
        num_rows=len(first.lengths),
        num_samples=first.num_samples,
        left_out=dict(first.left_out),
        kept_over_length=first.kept_over_length,
        quantiles={f"P{q}": int(planned[(len(planned) - 1) * q // 100]) for q in QUANTILES},
        num_batches=first.num_batches,
        num_windows=first.num_windows,
        short_window=first.num_batches % first.window_size,
        carried_out=len(first.carried_out),
        real_tokens=real,
        padded_tokens=padded,
        efficiency=real / padded,
        draft_positions=int(totals.anchors.sum()) * first.block_size,
        shapes=len(np.unique(first.counts * (int(first.widths.max()) + 1) + first.widths)),
        widths=len(np.unique(first.widths)),
        buckets=_bucket_rows(first, totals),
        repeats=None if mixing else repeats(first),
        weighting=weighting,
        step_deviation_tokens=float(steps.std()) if len(steps) else float("nan"),
        mean_tokens=mean,
        batch_mean_deviation_tokens=step_deviation(first, totals),
        lag_correlation=lag_correlation(first, totals),
        cost_spread=cost_spread(first, totals),
        repairing=repairing(first, second) if repaired is None else repaired,
        epochs=epochs,
        total_windows=first.num_windows + (second.num_windows if epochs > 1 else 0) + sum(later_windows),
        seconds=None if padded_tokens_per_s is None else padded * epochs / padded_tokens_per_s,
        fingerprint=first.fingerprint,
    )
    made.warnings.extend(_warnings(made, first))
    return made


def _planned_rows(plan: EpochPlan) -> np.ndarray:
    """Row of every entry that the epoch trains, in no useful order."""
    kept = np.zeros(plan.composition.num_batches, bool)
    kept[plan.sequence] = True
    return plan.composition.order[np.repeat(kept, np.diff(plan.composition.offsets))]


def _planned_lengths(plan: EpochPlan) -> np.ndarray:
    return plan.lengths[_planned_rows(plan)]


def _bucket_rows(plan: EpochPlan, totals: BatchTotals) -> list[BucketForecast]:
    rows = _planned_rows(plan)
    lengths = plan.lengths[rows].astype(np.int64)
    eligible = eligible_counts(lengths, None if plan.eligible is None else plan.eligible[rows], plan.settings)
    anchors = draft_positions(eligible, plan.num_anchors, 1)
    size = len(plan.edges)
    bucket = np.searchsorted(plan.edges, lengths)

    def by_sample(weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(bucket, weights, minlength=size)[:size]

    def by_batch(weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(plan.buckets, weights, minlength=size)[:size]

    samples, tokens = by_sample(), by_sample(lengths)
    batches, anchored = by_batch(), by_sample(anchors)
    slots = by_sample(anchors * mean_slots(eligible, plan.block_size))
    real, padded = by_batch(totals.real_tokens), by_batch(totals.padded_tokens)
    lows = np.concatenate([np.array([1]), plan.edges[:-1] + 1])
    made = []
    for k in range(size):
        weight = {"token": slots, "anchor": anchored, "sample": samples, "batch_mean": batches}
        made.append(
            BucketForecast(
                low=int(lows[k]),
                high=int(plan.edges[k]),
                samples=int(samples[k]),
                batches=int(batches[k]),
                real_tokens=int(tokens[k]),
                anchors=int(anchored[k]),
                share_samples=_share(samples, k),
                share_batches=_share(batches, k),
                share_tokens=_share(tokens, k),
                share_weight={name: _share(values, k) for name, values in weight.items()},
                efficiency=float(real[k] / padded[k]) if padded[k] else float("nan"),
            )
        )
    return made


def _share(values: np.ndarray, place: int) -> float:
    total = values.sum()
    return float(values[place] / total) if total else float("nan")


def _warnings(made: Forecast, plan: EpochPlan) -> list[str]:
    told = []
    reasons = {
        "over_length": f"are longer than plan.max_length {plan.settings.max_length}",
        "without_anchors": "have no eligible anchor",
        "weight": "are not due in the first epoch by plan.weights",
    }
    for reason, count in made.left_out.items():
        told.append(f"{count:,} of {made.num_rows:,} samples {reasons[reason]} and are left out.")
    if made.kept_over_length:
        told.append(f"{made.kept_over_length:,} samples longer than plan.max_length are kept.")
    if plan.composition.packed:
        told.append("Packed bins are for forwards that keep documents apart; padded ones need another strategy.")
    mixing = made.repeats is None
    for row in made.buckets:
        if not mixing and row.share_batches > BATCHES_OVER_SAMPLES * row.share_samples and row.share_batches > 0.1:
            told.append(
                f"Samples of {row.low}–{row.high} tokens are {row.share_samples:.0%} of the samples but make "
                f"{row.share_batches:.0%} of the micro-batches: a mean over batches would weigh each of them "
                f"{row.share_batches / row.share_samples:.1f} times. paceline weighs over the whole window instead."
            )
    if made.repeats is not None and made.repeats.crowded > 0.01:
        largest = max(made.buckets, key=lambda row: row.share_batches)
        told.append(
            f"In {made.repeats.crowded:.0%} of the windows one bucket makes three quarters of the batches or more "
            f"(last tenth: {made.repeats.crowded_last_tenth:.0%})"
            + (
                f"; the bucket {largest.low}–{largest.high} alone makes {largest.share_batches:.0%} of all batches."
                if largest.share_batches >= 0.5
                else "; schedule: stratified avoids it."
            )
        )
    if made.efficiency < 0.9:
        advice = {
            "grid": "a lower plan.width_multiple or more samples leave less",
            "sorted": "the lengths are too far apart for full batches of nearly one length",
        }.get(made.strategy, "strategy: grid wastes least")
        told.append(f"{1 - made.efficiency:.0%} of the padded tokens are padding; {advice}.")
    if made.repairing > 0.05:
        told.append(
            f"{made.repairing:.0%} of the samples that share a batch share one again in the next epoch"
            + ("; strategy: grid re-composes." if plan.settings.strategy == "sorted" else "; the data set is small.")
        )
    if plan.num_batches % plan.replicas:
        told.append(
            f"The {made.num_batches:,} micro-batches cannot be shared evenly among {plan.replicas} replicas, and there "
            "are not enough batches of several samples to split: in the last step of the epoch some replicas have one "
            "batch less. plan.leftover: carry, or a larger plan.max_samples or plan.token_budget, avoids it."
        )
    whole = whole_windows(plan, plan.buckets)
    if not len(whole):
        told.append(f"The epoch's {made.num_batches} micro-batches fill no window of {plan.window_size}.")
    return told
