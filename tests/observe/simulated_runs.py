"""Training simulated on real epoch plans: a sample's loss depends on its length, the plan decides who meets whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from paceline.config import ObserveConfig, PlanConfig
from paceline.observe.observer import open_observer
from paceline.plan.epoch import plan_epoch
from paceline.types import BucketTotals, Ratio, StepReport

NUM_ANCHORS, BLOCK = 64, 16


def skewed_lengths(count: int = 6000) -> np.ndarray:
    """Many short samples, few long ones, as in chat data."""
    return np.random.default_rng(7).lognormal(5.3, 0.8, count).astype(np.int64).clip(16, 4096)


def simulate(
    run_dir: Path,
    strategy: str,
    schedule: str,
    *,
    epochs: int = 6,
    length_effect: float = 0.25,
    accumulate: int = 8,
    plan: dict[str, Any] | None = None,
    **settings,
) -> Path:
    """A run directory as training on these plans would have left it.

    Args:
        run_dir: where it goes.
        strategy, schedule: of the plan.
        epochs: passes over the data.
        length_effect: nat by which the loss falls each time the length doubles.
        accumulate: micro-batches a step.
        plan: further settings of `PlanConfig`; with them the run directory holds its settings.
        settings: further ones of `ObserveConfig`.
    """
    rng = np.random.default_rng(3)
    lengths = skewed_lengths()
    eligible = lengths // 2
    chosen = {"token_budget": 16_384, "accumulate": accumulate, "strategy": strategy, "schedule": schedule}
    settled = PlanConfig(**chosen, **(plan or {}))
    run_dir.mkdir(parents=True, exist_ok=True)
    if plan is not None:
        (run_dir / "settings.yaml").write_text(yaml.safe_dump({"plan": settled.model_dump()}))
    plans = [
        plan_epoch(lengths, eligible, settled, num_anchors=NUM_ANCHORS, block_size=BLOCK, seed=0, epoch=epoch)
        for epoch in range(epochs)
    ]
    total = sum(plan.num_windows for plan in plans)
    observer = open_observer(
        ObserveConfig(console="quiet", **settings),
        run_dir,
        total_steps=total,
        header={"samples_per_epoch": int(lengths.size)},
    )
    step = 0
    for epoch, planned in enumerate(plans):
        for window in range(planned.num_windows):
            step += 1
            level = 2.5 + 3.0 * np.exp(-step / (0.2 * total))
            observer.step(_step(rng, planned, epoch, window, step, level, lengths, eligible, length_effect))
    observer.close()
    return run_dir


def _step(rng, planned, epoch, window, step, level, lengths, eligible, length_effect) -> StepReport:
    buckets: dict[int, BucketTotals] = {}
    indices = list(planned.window(window))
    for index in indices:
        batch = planned.batch(index)
        anchors = np.minimum(eligible[batch.rows], NUM_ANCHORS)
        sample_loss = level - length_effect * np.log2(lengths[batch.rows] / 200) + 0.3 * rng.normal(size=anchors.size)
        before = buckets.get(batch.bucket, BucketTotals(Ratio(0, 0), 0, 0, 0, 0, 0))
        buckets[batch.bucket] = BucketTotals(
            Ratio(
                before.loss.numerator + float(np.sum(sample_loss * anchors)),
                before.loss.denominator + float(anchors.sum()),
            ),
            before.micro_batches + 1,
            before.samples + anchors.size,
            before.anchors + int(anchors.sum()),
            before.real_tokens + batch.real_tokens,
            before.padded_tokens + batch.padded_tokens,
        )
    totals = list(buckets.values())
    anchors = sum(t.anchors for t in totals)
    accuracy = 0.8 * (1 - np.exp(-step / 40))
    ratios = {f"accuracy/slot_{k}": Ratio(accuracy * 0.93**k * anchors, anchors) for k in range(1, BLOCK)}
    ratios["acceptance/streak"] = Ratio(3 * accuracy * anchors, anchors)
    return StepReport(
        step=step,
        epoch=epoch,
        window=window,
        loss=Ratio(sum(t.loss.numerator for t in totals), sum(t.loss.denominator for t in totals)),
        ratios=ratios,
        buckets=buckets,
        batches=indices,
        gradient_norm=float(rng.lognormal(-0.7, 0.2)),
        clipped=False,
        skipped=False,
        learning_rate=6e-4,
        samples=sum(t.samples for t in totals),
        anchors=anchors,
        real_tokens=sum(t.real_tokens for t in totals),
        padded_tokens=sum(t.padded_tokens for t in totals),
        draft_positions=anchors * BLOCK,
        seconds=1.0,
        waits_s={"target/busy": 0.97, "target/blocked": 0.03, "drafter/busy": 0.5, "drafter/starved": 0.5},
        max_length=max(int(lengths[planned.batch(i).rows].max()) for i in indices),
    )
