"""Run directories as training leaves them, from step reports in which every number can be recounted by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from paceline.config import ObserveConfig, PlanConfig, Settings, dump_settings
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.metrics_file import EventLine, read_lines
from paceline.observe.observer import open_observer
from paceline.observe.run_history import read_history
from paceline.plan.epoch import plan_epoch
from paceline.types import BucketTotals, Ratio, StepReport, WorkerTotals


@dataclass(frozen=True)
class Sample:
    """One trained sample: its bucket, length, loss and anchors."""

    bucket: int
    length: int
    loss: float
    anchors: int


def report_of(step: int, samples: Sequence[Sample], *, block: int = 4, seconds: float = 0.5, **changes) -> StepReport:
    """The report of a step in which each bucket's samples formed one micro-batch."""
    buckets = {}
    for bucket in sorted({sample.bucket for sample in samples}):
        mine = [sample for sample in samples if sample.bucket == bucket]
        width = max(sample.length for sample in mine)
        buckets[bucket] = BucketTotals(
            loss=Ratio(sum(s.loss * s.anchors for s in mine), sum(s.anchors for s in mine)),
            micro_batches=1,
            samples=len(mine),
            anchors=sum(s.anchors for s in mine),
            real_tokens=sum(s.length for s in mine),
            padded_tokens=width * len(mine),
        )
    anchors = sum(s.anchors for s in samples)
    fields = {
        "step": step,
        "epoch": 0,
        "window": step - 1,
        "loss": Ratio(sum(s.loss * s.anchors for s in samples), anchors),
        "ratios": {
            "acceptance/streak": Ratio(1.5 * anchors, anchors),
            "accuracy/slot_1": Ratio(0.7 * anchors, anchors),
            "accuracy/slot_2": Ratio(0.5 * anchors, anchors),
            "accuracy/slot_3": Ratio(0.3 * anchors, anchors),
            "acceptance/slot_1": Ratio(0.7 * anchors, anchors),
        },
        "buckets": buckets,
        "batches": list(range(len(buckets))),
        "gradient_norm": 0.5,
        "clipped": False,
        "skipped": False,
        "learning_rate": 1e-3,
        "samples": len(samples),
        "anchors": anchors,
        "real_tokens": sum(t.real_tokens for t in buckets.values()),
        "padded_tokens": sum(t.padded_tokens for t in buckets.values()),
        "draft_positions": anchors * block,
        "seconds": seconds,
        "waits_s": {"target/busy": seconds * 0.8, "target/blocked": seconds * 0.2, "drafter/busy": seconds * 0.4},
        "max_length": max((s.length for s in samples), default=0),
    }
    return StepReport(**{**fields, **changes})


def random_samples(rng: np.random.Generator, count: int = 12) -> list[Sample]:
    """Samples of four buckets whose loss falls with length."""
    lengths = rng.integers(8, 512, size=count)
    return [
        Sample(int(np.searchsorted([64, 128, 256], n)), int(n), float(4 - n / 256 + rng.normal() / 10), int(n // 8 + 1))
        for n in lengths
    ]


def plain_reports(count: int = 60, **changes: Any) -> Iterator[StepReport]:
    """Steps of a healthy run; each change is a function from the step to a field's value."""
    rng = np.random.default_rng(0)
    for step in range(1, count + 1):
        samples = [replace(sample, loss=3.0 + 2.0 * np.exp(-step / 10)) for sample in random_samples(rng)]
        fields = {key: make(step) for key, make in changes.items()}
        yield report_of(step, samples, **fields)


def observed(
    run_dir: Path,
    reports: Iterable[StepReport],
    *,
    settings: dict[str, Any] | None = None,
    header: dict[str, Any] | None = None,
    total_steps: int | None = None,
    status: str = "finished",
    **observe: Any,
) -> Path:
    """A run directory after the observer has seen the reports."""
    reports = list(reports)
    run_dir.mkdir(parents=True, exist_ok=True)
    if settings is not None:
        (run_dir / "settings.yaml").write_text(yaml.safe_dump(settings))
    observer = open_observer(
        ObserveConfig(console="quiet", **observe),
        run_dir,
        total_steps=total_steps or len(reports),
        header={"samples_per_epoch": 12} if header is None else header,
    )
    for report in reports:
        observer.step(report)
    observer.close(status)
    return run_dir


def warnings_of(run_dir: Path) -> dict[str, str]:
    """What the diagnosis warns of, by key."""
    return {finding.key: finding.sentence for finding in diagnose(read_history(run_dir)) if finding.level == "warning"}


def shown(run_dir: Path) -> list[str]:
    """Warnings that were shown while the run went on."""
    events = [line for line in read_lines(run_dir / "metrics.jsonl")[0] if isinstance(line, EventLine)]
    return [event.fields["text"] for event in events if event.event == "warning"]


def write_manifest(run_dir: Path, **changes: Any) -> None:
    """A small store's manifest in the run directory."""
    report = {
        "rows_in": 50, "rows_used": 48, "samples": 48, "tokens": 9_600, "supervised_tokens": 4_000,
        "eligible_anchors": 3_900, "set_aside": {}, "notes": {}, "warnings": [],
        "tags": {"code": {"samples": 20, "tokens": 5_000, "supervised_tokens": 2_500}},
        "length_histogram": [[128, 20, 2_000], [512, 28, 7_600]],
    }  # fmt: skip
    folder = run_dir / "store"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"report": {**report, **changes}}))


def make_run_directory(
    run_dir: Path,
    *,
    steps: int = 40,
    status: str = "finished",
    changes: dict[str, Any] | None = None,
    validated: bool = False,
    skipped: Sequence[int] = (),
    alternate: bool = False,
) -> Path:
    """A whole run directory, with settings, facts and a prepared store.

    Args:
        run_dir: where it goes.
        steps: optimizer steps.
        status: how it ended.
        changes: further settings of `ObserveConfig`.
        validated: whether every tenth step has a held-out τ.
        skipped: steps without an update.
        alternate: whether samples of bucket 3 are in every second step only.
    """
    settings = ObserveConfig(console="quiet", **(changes or {}))
    observer = open_observer(settings, run_dir, total_steps=steps, header={"samples_per_epoch": 12 * steps})
    (run_dir / "settings.yaml").write_text(dump_settings(Settings(run_dir=str(run_dir), target={"path": "small"})))
    (run_dir / "run.json").write_text(json.dumps({"versions": {"paceline": "0.1.0"}, "drafter": {"block_size": 4}}))
    write_manifest(run_dir)
    rng = np.random.default_rng(0)
    workers = {"target_0": WorkerTotals(2, 200, 0.4), "target_1": WorkerTotals()}
    for step in range(1, steps + 1):
        observer.gauge("queue/features_items", 3)
        observer.gauge("queue/features_bytes", 2048)
        level = 2 * np.exp(-step / 60)
        samples = [replace(sample, loss=sample.loss + level) for sample in random_samples(rng, 40)]
        if alternate and step % 2:
            samples = [sample for sample in samples if sample.bucket != 3]
        report = report_of(step, samples, workers=workers, skipped=step in skipped)
        if validated and step % 10 == 0:
            report = replace(report, ratios={**report.ratios, "validation/acceptance/streak": Ratio(10, 10)})
        observer.step(report)
    observer.close(status)
    return run_dir


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
