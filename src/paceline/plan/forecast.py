"""What a plan promises: padding, buckets, windows, steps, time, and in sentences what a person should look at.

Shape letters: E entries, M micro-batches, K buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from paceline.plan.epoch import EpochPlan
from paceline.plan.metrics import (
    BatchTotals,
    Repeats,
    batch_totals,
    cost_spread,
    repairing,
    repeats,
    sample_weights,
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
        cost_spread: largest over mean work of the replicas in a window.
        repairing: share of batch-mates that meet again in the next epoch.
        epochs, total_windows: optimizer steps of a run of that many epochs, counted epoch by epoch.
        seconds: of the run at the given speed; None without one.
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
    cost_spread: float
    repairing: float
    epochs: int
    total_windows: int
    seconds: float | None
    fingerprint: str
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The forecast as plain values for JSON; numbers that do not exist are None."""
        return msgspec.json.decode(msgspec.json.encode(self))


def forecast(
    plan_of: Callable[[int], EpochPlan],
    epochs: int,
    *,
    weighting: Weighting = "token",
    real_tokens_per_s: float | None = None,
) -> Forecast:
    """Plans every epoch of a run, and measures the first one against the second.

    Args:
        plan_of: the plan of an epoch (0-based).
        epochs: length of the run.
        weighting: of the objective: what counts equally in the loss of a step.
        real_tokens_per_s: speed of the pipeline, for an estimate of the time.

    Raises:
        PlanError: as `plan_epoch`.
    """
    first, second = plan_of(0), plan_of(1)
    windows = [first.num_windows, second.num_windows, *(plan_of(epoch).num_windows for epoch in range(2, epochs))]
    return describe(
        first,
        repairing(first, second),
        windows[:epochs],
        weighting=weighting,
        real_tokens_per_s=real_tokens_per_s,
    )


def describe(
    plan: EpochPlan,
    repaired: float,
    windows: Sequence[int],
    *,
    weighting: Weighting,
    real_tokens_per_s: float | None = None,
) -> Forecast:
    """The forecast of a run from its first plan; arguments as for `forecast`.

    ``repaired`` is the share of batch-mates that meet again, which does not depend on the schedule; ``windows`` are
    the optimizer steps of each epoch.
    """
    totals, settings = batch_totals(plan), plan.settings
    padded, real = int(totals.padded_tokens.sum()), int(totals.real_tokens.sum())
    planned = np.sort(plan.lengths[_planned_rows(plan)])
    steps, mean = weighted_means(plan, weighting)
    mixing = plan.batches.packed or settings.strategy == "shuffled"
    made = Forecast(
        strategy=settings.strategy,
        schedule=settings.schedule,
        replicas=plan.given.replicas,
        accumulate=settings.accumulate,
        num_rows=len(plan.lengths),
        num_samples=plan.num_samples,
        left_out=dict(plan.left_out),
        kept_over_length=plan.kept_over_length,
        quantiles={f"P{q}": int(planned[(len(planned) - 1) * q // 100]) for q in QUANTILES},
        num_batches=plan.num_batches,
        num_windows=plan.num_windows,
        short_window=plan.num_batches % plan.window_size,
        carried_out=len(plan.carried_out),
        real_tokens=real,
        padded_tokens=padded,
        efficiency=real / padded,
        draft_positions=int(totals.anchors.sum()) * plan.given.block_size,
        shapes=len(np.unique(plan.counts * (int(plan.widths.max()) + 1) + plan.widths)),
        widths=len(np.unique(plan.widths)),
        buckets=_bucket_rows(plan, totals),
        repeats=None if mixing else repeats(plan),
        weighting=weighting,
        step_deviation_tokens=float(steps.std()) if len(steps) else float("nan"),
        mean_tokens=mean,
        batch_mean_deviation_tokens=step_deviation(plan, totals),
        cost_spread=cost_spread(plan, totals),
        repairing=repaired,
        epochs=len(windows),
        total_windows=sum(windows),
        seconds=None if real_tokens_per_s is None else real * len(windows) / real_tokens_per_s,
        fingerprint=plan.fingerprint,
    )
    made.warnings.extend(_warnings(made, plan))
    return made


def _planned_rows(plan: EpochPlan) -> np.ndarray:
    """Row of every entry that the epoch trains, in no useful order."""
    kept = np.zeros(plan.batches.num_batches, bool)
    kept[plan.sequence] = True
    return plan.batches.order[np.repeat(kept, np.diff(plan.batches.offsets))]


def _bucket_rows(plan: EpochPlan, totals: BatchTotals) -> list[BucketForecast]:
    rows, size = _planned_rows(plan), len(plan.edges)
    bucket = np.searchsorted(plan.edges, plan.lengths[rows])

    def by_sample(weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(bucket, weights, minlength=size)[:size]

    def by_batch(weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(plan.buckets, weights, minlength=size)[:size]

    samples, tokens, batches = by_sample(), by_sample(plan.lengths[rows]), by_batch()
    weight = {name: by_sample(sample_weights(plan, rows, name)) for name in ("token", "anchor", "sample")}
    weight["batch_mean"] = batches
    real, padded = by_batch(totals.real_tokens), by_batch(totals.padded_tokens)
    lows = np.concatenate([np.array([1]), plan.edges[:-1] + 1])
    return [
        BucketForecast(
            low=int(lows[k]),
            high=int(plan.edges[k]),
            samples=int(samples[k]),
            batches=int(batches[k]),
            real_tokens=int(tokens[k]),
            anchors=int(weight["anchor"][k]),
            share_samples=_share(samples, k),
            share_batches=_share(batches, k),
            share_tokens=_share(tokens, k),
            share_weight={name: _share(values, k) for name, values in weight.items()},
            efficiency=float(real[k] / padded[k]) if padded[k] else float("nan"),
        )
        for k in range(size)
    ]


def _share(values: np.ndarray, place: int) -> float:
    total = values.sum()
    return float(values[place] / total) if total else float("nan")


def _warnings(made: Forecast, plan: EpochPlan) -> list[str]:
    reasons = {
        "over_length": f"are longer than plan.max_length {plan.settings.max_length}",
        "without_anchors": "have no eligible anchor",
        "weight": "are not due in the first epoch by plan.weights",
    }
    found = [
        f"{count:,} of {made.num_rows:,} samples {reasons[reason]} and are left out."
        for reason, count in made.left_out.items()
    ]
    if made.kept_over_length:
        found.append(f"{made.kept_over_length:,} samples longer than plan.max_length are kept.")
    if plan.batches.packed:
        found.append("Packed bins are for forwards that keep documents apart; padded ones need another strategy.")
    if made.repeats is not None:
        found += _crowding(made, made.repeats)
    if made.efficiency < 0.9:
        advice = {
            "grid": "a lower plan.width_multiple or more samples leave less",
            "sorted": "the lengths are too far apart for full batches of nearly one length",
        }.get(made.strategy, "strategy: grid wastes least")
        found.append(f"{1 - made.efficiency:.0%} of the padded tokens are padding; {advice}.")
    if made.repairing > 0.05:
        found.append(
            f"{made.repairing:.0%} of the samples that share a batch share one again in the next epoch"
            + ("; strategy: grid re-composes." if made.strategy == "sorted" else "; the data set is small.")
        )
    if not len(whole_windows(plan, plan.buckets)):
        found.append(f"The epoch's {made.num_batches} micro-batches fill no window of {plan.window_size}.")
    return found


def _crowding(made: Forecast, spread: Repeats) -> list[str]:
    """Sentences on buckets that make many batches, and on windows with many batches of one bucket."""
    found = [
        f"Samples of {row.low}–{row.high} tokens are {row.share_samples:.0%} of the samples but make "
        f"{row.share_batches:.0%} of the micro-batches: a mean over batches would weigh each of them "
        f"{row.share_batches / row.share_samples:.1f} times. paceline weighs over the whole window instead."
        for row in made.buckets
        if row.share_batches > max(BATCHES_OVER_SAMPLES * row.share_samples, 0.1)
    ]
    if spread.crowded > 0.01:
        largest = max(made.buckets, key=lambda row: row.share_batches)
        found.append(
            f"In {spread.crowded:.0%} of the windows one bucket makes three quarters of the batches or more "
            f"(last tenth: {spread.crowded_last_tenth:.0%})"
            + (
                f"; the bucket {largest.low}–{largest.high} alone makes {largest.share_batches:.0%} of all batches."
                if largest.share_batches >= 0.5
                else "; schedule: stratified avoids it."
            )
        )
    return found
