"""What observing costs the training loop: CPU time of its thread a step, by what is switched on.

    python benchmarks/observe.py [--steps 2000] [--buckets 8] [--slots 15]
    python benchmarks/observe.py --demo 30

Prints one row a configuration: microseconds a step (mean over the run, 99 % quantile), the mean's share of a step of
100 ms, and the bytes of a metric line. It is the CPU time of the calling thread, for that is what a step waits for;
each tracker works in a process of its own. The step report is like a real one: all slots, all buckets, two stages.

`--demo N` trains N steps of the demo in this process, with trace and live diagnosis on, and prints what share of the
CPU time of the training thread went into everything observed: completing reports, metrics, spans, gauges.
"""

from __future__ import annotations

import argparse
import importlib
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.config import ObserveConfig
from paceline.observe.observer import open_observer
from paceline.types import BucketTotals, Ratio, StepReport

CONFIGURATIONS: dict[str, dict[str, object]] = {
    "metrics.jsonl alone": {"console": "quiet", "diagnose_every_steps": 0},
    "+ plain lines": {"console": "plain", "diagnose_every_steps": 0},
    "+ live bar": {"console": "rich", "diagnose_every_steps": 0},
    "+ diagnosis every 200 steps": {"console": "rich"},
    "+ W&B offline": {"console": "rich", "wandb": "offline"},
    "line every 10 steps": {"console": "rich", "every_steps": 10},
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--buckets", type=int, default=8)
    parser.add_argument("--slots", type=int, default=15)
    parser.add_argument("--demo", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    if arguments.demo:
        demo(arguments.demo)
        return
    table = Table("observing", "µs a step", "99 %", "of a 100 ms step", "bytes a line", title="Cost of observing")
    for name, settings in CONFIGURATIONS.items():
        costs, size = measure(ObserveConfig(**settings), arguments.steps, arguments.buckets, arguments.slots)  # type: ignore[arg-type]
        mean = float(np.mean(costs))
        table.add_row(
            name, f"{mean * 1e6:.0f}", f"{np.quantile(costs, 0.99) * 1e6:.0f}", f"{mean / 0.1:.3%}", f"{size:.0f}"
        )
    Console().print(table)


def measure(settings: ObserveConfig, steps: int, buckets: int, slots: int) -> tuple[np.ndarray, float]:
    """CPU seconds of each `Observer.step` [steps], and bytes a line."""
    rng = np.random.default_rng(0)
    reports = [report(rng, step, buckets, slots) for step in range(1, steps + 1)]
    costs = np.zeros(steps)
    with tempfile.TemporaryDirectory() as folder:
        console = Console(file=io.StringIO(), force_terminal=settings.console == "rich", width=120)
        observer = open_observer(
            settings, Path(folder), total_steps=steps, header={"samples_per_epoch": 10**6}, console=console
        )
        for position, item in enumerate(reports):
            began = time.thread_time()
            observer.step(item)
            costs[position] = time.thread_time() - began
            time.sleep(0.001)  # a step's pause, in which the other threads may run
        observer.close()
        lines = (Path(folder) / "metrics.jsonl").read_bytes()
    return costs, len(lines) / max(lines.count(b'"kind":"step"'), 1)


def demo(steps: int) -> None:
    """Train some steps of the demo and print the share of its CPU time that observing took."""
    training = importlib.import_module("paceline.train")
    from paceline.cli.demo import Arguments, demo_settings
    from paceline.cli.train import ready_store
    from paceline.observe.observer import Observer
    from paceline.run.build import build_run, resolve_models
    from paceline.run.step_metrics import StepMetrics

    spent = {"s": 0.0, "depth": 0.0}
    marks: list[tuple[float, float]] = []

    def timed(owner: type, name: str) -> None:
        work = getattr(owner, name)

        def measured(*arguments: Any, **named: Any) -> Any:
            if spent["depth"]:
                return work(*arguments, **named)
            spent["depth"], began = 1.0, time.thread_time()
            try:
                return work(*arguments, **named)
            finally:
                spent["depth"] = 0.0
                spent["s"] += time.thread_time() - began
                if name == "step":
                    marks.append((time.thread_time(), spent["s"]))

        setattr(owner, name, measured)

    for owner, name in ((StepMetrics, "__call__"), *((Observer, n) for n in ("step", "span", "gauge", "event"))):
        timed(owner, name)
    with tempfile.TemporaryDirectory() as folder:
        overrides = {"train.max_steps": str(steps), "flow.mode": "inline", "observe.trace": "true"}
        settings = demo_settings(Arguments(Path(folder) / "run"), {**overrides, "observe.diagnose_every_steps": "20"})
        models = resolve_models(settings)
        ready_store(settings, models.facts)
        run = build_run(settings, models)
        training.train(run, notice=print, console=Console(file=io.StringIO(), width=120))
    (first_s, before_s), (last_s, after_s) = marks[0], marks[-1]
    whole, observing = (last_s - first_s) / (steps - 1), (after_s - before_s) / (steps - 1)
    cost = f"observing {observing * 1e6:.0f} µs = {observing / whole:.2%}"
    Console().print(f"{steps} steps: {whole * 1e3:.0f} ms of CPU a step, {cost}")


def report(rng: np.random.Generator, step: int, buckets: int, slots: int) -> StepReport:
    """A step in which every bucket and slot took part."""
    losses = 2 + rng.normal(size=buckets) / 10
    totals = {b: BucketTotals(Ratio(losses[b] * 4000, 4000.0), 1, 24, 512, 24_000, 24_960) for b in range(buckets)}
    blocks = 512.0 * buckets
    ratios = {f"accuracy/slot_{slot}": Ratio(blocks * 0.7**slot, blocks) for slot in range(1, slots + 1)}
    ratios |= {f"acceptance/slot_{slot}": Ratio(blocks * 0.6**slot, blocks) for slot in range(1, slots + 1)}
    ratios |= {"acceptance/streak": Ratio(blocks * 2.5, blocks), "accuracy/all": Ratio(blocks * 0.4, blocks)}
    return StepReport(
        step=step,
        epoch=0,
        window=step - 1,
        loss=Ratio(float(losses.sum()) * 4000, 4000.0 * buckets),
        ratios=ratios,
        buckets=totals,
        batches=list(range(step * buckets, (step + 1) * buckets)),
        gradient_norm=float(rng.lognormal()),
        clipped=False,
        skipped=False,
        learning_rate=6e-4,
        samples=24 * buckets,
        anchors=512 * buckets,
        real_tokens=24_000 * buckets,
        padded_tokens=24_960 * buckets,
        draft_positions=512 * 16 * buckets,
        seconds=0.1,
        waits_s={f"{s}/{state}": 0.03 for s in ("target", "drafter") for state in ("busy", "starved", "blocked")},
        max_length=4096,
    )


if __name__ == "__main__":
    main()
