"""How close the pipeline comes to its slowest stage, with stages that sleep instead of computing: no GPU needed.

    python benchmarks/pipeline.py [--windows 12] [--target-us 40] [--draft-us 60] [--jitter 0.3] [--splits 1:1,4:1,7:1]
    python benchmarks/pipeline.py --pool
    python benchmarks/pipeline.py --demo 30

The first form runs real hub, processes, pool and prefetch. A target worker sleeps `--target-us` microseconds a real
token, a drafter rank `--draft-us` a draft position, each times a random factor of the given spread; ranks meet after
every window, as they do to add up gradients. For every split and both deliveries it prints the wall time as a share of
the slowest stage's own limit: the work of all targets over their number, or, window by window, the work of the rank
that had most. Sleeps are measured, so that a late wake-up counts as work of its stage. It names the bottleneck
from what the run reports alone, and the split that it would choose for as many devices.

`--pool` prints hand-over time, and the speed of a copy into the pool against one between two plain arrays.
`--demo N` trains N steps of the demo with its own settings inline, then as a pipeline, and prints both wall times.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from paceline.check.memory_budget import Split, best_split
from paceline.pipeline.coordinator import Coordinator, Work
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.messages import (
    BufferReleased,
    BuildDrafter,
    DrafterBuilt,
    DrafterTask,
    FeaturesReady,
    ShareWeights,
    StepTaken,
    TakeStep,
    TargetTask,
    WeightsShared,
)
from paceline.pipeline.multinode import ALONE, RankInfo, rank_groups
from paceline.pipeline.prefetch import Prefetcher
from paceline.pipeline.process import Stage, WorkerProcess
from paceline.pipeline.telemetry import RemoteObserver
from paceline.types import HostBatch, PlannedBatch, PlannedStep, Ratio, SharedWeights, StepReport

TAIL = 2
"""Windows at the end that are not measured: targets have nothing left to run ahead with."""

SPLITS = "1:1,2:1,4:1,7:1,2:2,4:2,6:2,4:4"


@dataclass(frozen=True)
class Load:
    """What the simulated stages have to do.

    Attributes:
        target_us: microseconds of a target worker a real token.
        draft_us: microseconds of a drafter rank a draft position.
        jitter: spread of the random factor of every batch and stage (log-normal).
        accumulate: micro-batches of a window and rank.
        tokens: real tokens of a batch, on average.
    """

    target_us: float = 40.0
    draft_us: float = 60.0
    jitter: float = 0.3
    accumulate: int = 4
    tokens: int = 1000

    def factor(self, stage: str, index: int) -> float:
        """The random factor of one batch in one stage; 1 on average."""
        return math.exp(random.Random(f"{stage} {index}").gauss(0.0, self.jitter) - self.jitter**2 / 2)

    def target_s(self, planned: PlannedBatch) -> float:
        """Seconds of a target worker for a batch."""
        return self.target_us * 1e-6 * planned.real_tokens * self.factor("target", planned.index)

    def drafter_s(self, planned: PlannedBatch) -> float:
        """Seconds of a drafter rank for a batch."""
        return self.draft_us * 1e-6 * planned.draft_positions * self.factor("drafter", planned.index)


class SleepingTarget(Stage):
    """Sleeps as long as a target would compute."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def handle(self, message: ShareWeights | TargetTask) -> Iterator[WeightsShared | FeaturesReady]:
        """Sleep."""
        if isinstance(message, ShareWeights):
            yield WeightsShared(SharedWeights(torch.empty(0), torch.empty(0)))
            return
        time.sleep(self.load.target_s(message.host.planned))
        yield FeaturesReady(message.buffer)


class SleepingDrafter(Stage):
    """Sleeps as long as a drafter rank would compute, and meets the others at the end of every window."""

    def __init__(self, load: Load, group: RankInfo | None) -> None:
        self.load, self.busy_s, self.batches = load, 0.0, []
        self.world = group.join("cpu") if group else None

    def handle(
        self, message: BuildDrafter | DrafterTask | TakeStep
    ) -> Iterator[DrafterBuilt | BufferReleased | StepTaken]:
        """Sleep, or report the window: the loss holds the work of the rank that had most, `seconds` that of all."""
        if isinstance(message, BuildDrafter):
            yield DrafterBuilt()
            return
        if isinstance(message, DrafterTask):
            began = time.perf_counter()
            time.sleep(self.load.drafter_s(message.host.planned))
            self.busy_s += time.perf_counter() - began
            self.batches.append(message.host.planned.index)
            yield BufferReleased(message.buffer)
            return
        most, total = torch.tensor(self.busy_s), torch.tensor(self.busy_s)
        if self.world is not None:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.world)
            dist.all_reduce(total, group=self.world)
        yield StepTaken(window_report(message.planned, self.batches, float(most), float(total)))
        self.busy_s, self.batches = 0.0, []


class NoCheckpoints:
    """None is planned, and none is due."""

    def due(self, planned: PlannedStep) -> bool:
        """Never."""
        return False

    def announce(self, step: int) -> dict[str, Any]:
        """Not asked for."""
        return {}


@dataclass(frozen=True)
class Outcome:
    """One split, measured.

    Attributes:
        targets, drafters, delivery: what was run.
        share: the slowest stage's own limit over the wall time.
        bottleneck: the stage that the run's own waits name.
        truth: the stage that the load makes the slower one.
        target_s, drafter_s: measured seconds of work a batch.
        batches_per_s: throughput.
        best: the split that the load makes the fastest.
    """

    targets: int
    drafters: int
    delivery: str
    share: float
    bottleneck: str
    truth: str
    target_s: float
    drafter_s: float
    batches_per_s: float
    best: Split


def planned_batches(load: Load, windows: int, ranks: int) -> list[PlannedBatch]:
    """Batches of different sizes: from half of the average to one and a half, drafts in proportion."""
    count = windows * load.accumulate * ranks
    chance = random.Random(0)
    found = []
    for index in range(count):
        tokens = int(load.tokens * chance.uniform(0.5, 1.5))
        drafts = tokens // 2
        place = index % (load.accumulate * ranks)
        rows = np.array([index])
        found.append(
            PlannedBatch(
                index, 0, index // (load.accumulate * ranks), place % ranks, 0, 0, rows, tokens, tokens, tokens, drafts
            )
        )
    return found


def host_of(planned: PlannedBatch) -> HostBatch:
    """A host batch of one row, with tokens of no meaning."""
    ids, none = np.zeros((1, planned.width), dtype=np.int64), np.zeros(0, dtype=np.int64)
    return HostBatch(planned, ids, ids == 0, np.array([planned.real_tokens]), none, np.zeros(1, dtype=np.int64))


def measure(
    load: Load, targets: int, drafters: int, delivery: str, *, windows: int, buffers: int | None = None
) -> Outcome:
    """Run one split.

    The first window, in which the pipeline fills, and two more at the end, in which it drains, are left out.
    """
    windows += TAIL + 1
    from paceline.config.schema import FlowConfig

    planned = planned_batches(load, windows, drafters)
    devices = {"target_devices": ["cpu"] * targets, "drafter_devices": ["cpu"] * drafters}
    flow = FlowConfig(**devices, delivery=delivery, pool_buffers=buffers, stall_limit_s=60.0)
    size = load.accumulate * drafters
    steps = [PlannedStep(w + 1, 0, w, range(w * size, (w + 1) * size), save=False) for w in range(windows)]
    feed = Prefetcher(map(host_of, planned), flow.prefetch_batches * targets)
    pool = FeaturePool(flow.num_buffers, 1, 1, torch.float32)
    with rank_groups(ALONE, drafters) as groups:
        workers = [WorkerProcess(f"target {n}", SleepingTarget, (load,)) for n in range(targets)]
        workers += [WorkerProcess(f"drafter {n}", SleepingDrafter, (load, group)) for n, group in enumerate(groups)]
        try:
            coordinator = Coordinator(
                workers[:targets],
                workers[targets:],
                pool,
                Work(steps, feed),
                flow,
                saves=NoCheckpoints(),
                telemetry=RemoteObserver(),
            )
            ends, reports = [], []
            for report, times in coordinator.run():
                ends.append(time.perf_counter())
                reports.append(replace(report, waits_s=times.waits_s))
        finally:
            feed.close()
            for worker in workers:
                worker.stop(1.0)
    return outcome_of(load, targets, drafters, delivery, planned, reports, ends)


def outcome_of(
    load: Load,
    targets: int,
    drafters: int,
    delivery: str,
    planned: list[PlannedBatch],
    reports: list[StepReport],
    ends: list[float],
) -> Outcome:
    """The figures of a run from its reports and the times at which they came."""
    wall, counted = ends[-1 - TAIL] - ends[0], reports[1:-TAIL]
    target_busy = sum(report.waits_s["target/busy"] for report in counted)
    drafter_most = sum(report.loss.numerator for report in counted)
    batches = sum(load.accumulate * drafters for _ in counted)
    work = {"target": target_busy / targets, "drafter": drafter_most}
    ideal = {
        "target": sum(map(load.target_s, planned)) / targets,
        "drafter": sum(map(load.drafter_s, planned)) / drafters,
    }
    starved = sum(report.waits_s["drafter/starved"] for report in counted) / drafters
    blocked = sum(report.waits_s["target/blocked"] for report in counted) / targets
    return Outcome(
        targets,
        drafters,
        delivery,
        share=max(work.values()) / wall,
        bottleneck="target" if starved > blocked else "drafter",
        truth=max(ideal, key=lambda stage: ideal[stage]),
        target_s=sum(report.waits_s["target/busy"] for report in reports) / len(planned),
        drafter_s=sum(report.seconds for report in reports) / len(planned),
        best=best_split(targets + drafters, *(sum(map(work, planned)) for work in (load.target_s, load.drafter_s))),
        batches_per_s=batches / wall,
    )


def window_report(planned: PlannedStep, batches: list[int], most_s: float, total_s: float) -> StepReport:
    """A report with nothing but its batches, and the work of the busiest rank and of all."""
    nothing: dict[str, Any] = dict.fromkeys(
        ("samples", "anchors", "real_tokens", "padded_tokens", "draft_positions"), 0
    )
    return StepReport(
        step=planned.step,
        epoch=planned.epoch,
        window=planned.window,
        loss=Ratio(most_s, 1.0),
        ratios={},
        buckets={},
        batches=batches,
        gradient_norm=0.0,
        clipped=False,
        skipped=False,
        learning_rate=0.0,
        seconds=total_s,
        **nothing,
    )


def show_splits(load: Load, splits: list[tuple[int, int]], windows: int, buffers: int | None) -> None:
    """Every split with both deliveries."""
    table = Table("targets", "drafters", "delivery", "of the limit", "bottleneck", "batches/s", "would choose")
    wrong = misled = 0
    for targets, drafters in splits:
        for delivery in ("ordered", "ready"):
            found = measure(load, targets, drafters, delivery, windows=windows, buffers=buffers)
            best = best_split(targets + drafters, found.target_s, found.drafter_s)
            wrong += found.bottleneck != found.truth
            misled += best.targets != found.best.targets
            table.add_row(
                str(targets),
                str(drafters),
                delivery,
                f"{found.share:.1%}",
                found.bottleneck + ("" if found.bottleneck == found.truth else f" (is {found.truth})"),
                f"{found.batches_per_s:.1f}",
                f"{best.targets}:{best.drafters}"
                + ("" if best.targets == found.best.targets else f" (is {found.best.targets}:{found.best.drafters})"),
            )
    console = Console()
    console.print(table)
    console.print(f"of {2 * len(splits)} runs: bottleneck named wrongly in {wrong}, another split chosen in {misled}")


def show_pool(megabytes: int = 64, repeats: int = 10) -> None:
    """Hand-over time of empty work, and copies."""
    idle = Load(target_us=0.0, draft_us=0.0)
    found = measure(idle, 1, 1, "ordered", windows=100)
    numbers = megabytes * 2**20 // 4
    source, plain = torch.rand(numbers), torch.rand(numbers)
    pool = FeaturePool(2, numbers, 1, torch.float32)
    rows = [("plain array", plain), ("pool buffer", pool.view(0, numbers).view(-1))]
    table = Table("copy into", "GiB/s")
    for name, place in rows:
        place.copy_(source)
        began = time.perf_counter()
        for _ in range(repeats):
            place.copy_(source)
        table.add_row(name, f"{repeats * megabytes / 1024 / (time.perf_counter() - began):.2f}")
    console = Console()
    console.print(f"hand-over: {1e6 / found.batches_per_s:.0f} µs a batch from host batch to released buffer, no work")
    console.print(table)


def show_demo(steps: int) -> None:
    """The demo's own settings, inline and as a pipeline."""
    from paceline.cli.demo import Arguments, demo_settings
    from paceline.cli.train import train_run

    table = Table("mode", "wall, s", "steps/s after the first")
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("inline", "pipeline"):
            changes = {"flow.mode": mode, "train.max_steps": str(steps), "observe.console": "quiet"}
            settings = demo_settings(Arguments(run_dir=Path(folder) / mode), changes)
            began = time.perf_counter()
            train_run(settings)
            wall = time.perf_counter() - began
            text = (Path(settings.run_dir) / "metrics.jsonl").read_text()
            table.add_row(mode, f"{wall:.1f}", steady_rate(text))
    Console().print(table)


def steady_rate(metrics: str) -> str:
    """Steps a second between the first and the last step line."""
    import json

    lines = [json.loads(line) for line in metrics.splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    return f"{(steps[-1]['step'] - steps[0]['step']) / (steps[-1]['time'] - steps[0]['time']):.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--target-us", type=float, default=40.0)
    parser.add_argument("--draft-us", type=float, default=60.0)
    parser.add_argument("--jitter", type=float, default=0.3)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--buffers", type=int, help="feature buffers; those of the settings where not given")
    parser.add_argument("--splits", default=SPLITS)
    parser.add_argument("--pool", action="store_true")
    parser.add_argument("--demo", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    if arguments.demo:
        show_demo(arguments.demo)
    elif arguments.pool:
        show_pool()
    else:
        splits = [(int(a), int(b)) for a, b in (split.split(":") for split in arguments.splits.split(","))]
        load = Load(arguments.target_us, arguments.draft_us, arguments.jitter, arguments.accumulate)
        show_splits(load, splits, arguments.windows, arguments.buffers)


if __name__ == "__main__":
    main()
