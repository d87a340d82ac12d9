"""All checks of a run, for the report and while the run continues; and the checks of its stages and workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from paceline.observe.diagnosis import Finding
from paceline.observe.diagnosis.learning import (
    flat_slots,
    forwards_differ,
    held_out_below_training,
    leak,
    learns_nothing,
    loss_rising,
    tree_below_chain,
    trends,
)
from paceline.observe.diagnosis.mixture import (
    coverage,
    loss_jitter,
    one_sided_steps,
    padding,
    starved_tags,
    supervised_coverage,
)
from paceline.observe.diagnosis.optimizer import clipping, frozen_norms, gradient_spikes, skipped_steps
from paceline.observe.metrics_file import EventLine, HeaderLine, StepLine
from paceline.observe.run_history import History, assemble, read_settings
from paceline.text import percent

MIN_STEPS = 20
"""Of runs of fewer optimizer steps only a failure is named."""
MEMORY_LINES = 1000
"""Newest lines that are looked at while a run continues; a look at a thousand takes about 20 ms."""


def diagnose(run: History) -> list[Finding]:
    """All findings, warnings first."""
    findings = failure(run)
    if run.spans.sum() >= MIN_STEPS:
        findings += [finding for check in CHECKS for finding in check(run)]
    return sorted(findings, key=lambda finding: finding.level == "info")


class LiveDiagnosis:
    """Keeps the newest lines of a run that continues and looks at them now and then; shows each warning once.

    Args:
        run_dir: directory of the run; its settings.yaml says what advice fits.
        every_steps: optimizer steps between looks; 0 for never.
        total_steps, first_step: of the run, and of this start.
    """

    def __init__(self, run_dir: Path, every_steps: int, total_steps: int, first_step: int) -> None:
        self._run_dir, self._every_steps, self._total_steps = run_dir, every_steps, total_steps
        self._lines: deque[StepLine] = deque(maxlen=MEMORY_LINES)
        self._events: deque[EventLine] = deque(maxlen=MEMORY_LINES)
        self._next = first_step + every_steps
        self._shown: set[str] = set()

    def note(self, line: EventLine) -> None:
        """Take in an event, for the next look."""
        self._events.append(line)

    def see(self, line: StepLine) -> list[Finding]:
        """Take in a line; gives the warnings that were not given before, where it was time to look."""
        if not self._every_steps:
            return []
        self._lines.append(line)
        if line.step < self._next and line.step < self._total_steps:  # the last step is always a look
            return []
        self._next = line.step + self._every_steps
        header = HeaderLine(0, line.time, 0, self._total_steps, {})
        run = assemble(self._run_dir, [header, *self._lines, *self._events], settings=read_settings(self._run_dir, []))
        fresh = [finding for finding in diagnose(run) if finding.level == "warning" and finding.key not in self._shown]
        self._shown.update(finding.key for finding in fresh)
        return fresh


def failure(run: History) -> list[Finding]:
    """What ended the run before its time."""
    if not run.status.startswith("failed"):
        return []
    step = int(run.steps[-1]) if run.steps.size else 0
    text = f"The run {run.status.rstrip('.')}, after step {step}."
    return [Finding("failure", "warning", text, "fix that and start it again: it resumes from its newest checkpoint")]


def bottleneck(run: History) -> list[Finding]:
    """Which stage sets the pace, and what would move it."""
    names = sorted({name.split("/")[1] for name in run.values if name.startswith("stage/")})
    busy = {name: run.pooled(f"stage/{name}/busy") for name in names}
    busy = {name: share for name, share in busy.items() if np.isfinite(share)}
    if len(busy) < 2:
        return []
    slowest = max(busy, key=lambda name: busy[name])
    shares = ", ".join(f"{name} {percent(share)}" for name, share in busy.items())
    if run.setting("flow", "mode") == "inline" or sum(busy.values()) <= 1.02:
        gain = sum(busy.values()) / busy[slowest]
        text = f"The stages take turns; busy: {shares}."
        advice = f"flow.mode: pipeline overlaps them, at best {gain:.1f} times as fast where each has its device"
    elif busy[slowest] < 0.7:
        text = f"No stage is busy most of its time ({shares}): batches are made or handed over too slowly."
        advice = "raise flow.prefetch_batches and flow.pool_buffers"
    elif slowest == "feed":
        text = (
            f"The feed is the bottleneck: one thread that reads and pads is busy {percent(busy['feed'])} of its time."
        )
        advice = "put the store on a faster disk, or in memory"
    else:
        idle = ", ".join(f"the {name} waits {percent(1 - share)}" for name, share in busy.items() if name != slowest)
        text = f"The {slowest} is the bottleneck: busy {percent(busy[slowest])} of its time, while {idle}."
        others = [name for name in busy if name != slowest and _device_count(run, name) > 1 and busy[name] < 0.8]
        if others:
            advice = f"move a device from flow.{others[0]}_devices to flow.{slowest}_devices"
        else:
            advice = f"add a device to flow.{slowest}_devices"
            advice += ", or lower drafter.num_anchors" * (slowest == "drafter")
    return [Finding("bottleneck", "info", text, advice)]


SLOW = 0.85
"""Speed of a worker, as a share of the median of its peers, below which it is called slow."""
SLOW_LINES = 60
"""Newest lines in which it must be that slow: in each half of them, so that one hiccup is not enough."""


def slow_workers(run: History) -> list[Finding]:
    """Workers that need more time for a token than their peers of the same stage, for long."""
    names = [name.split("/")[1] for name in run.values if name.startswith("worker/") and name.endswith("/busy")]
    half = SLOW_LINES // 2
    if run.steps.size < SLOW_LINES:
        return []
    findings = []
    for stage in sorted({name.rpartition("_")[0] for name in names}):
        peers = sorted(name for name in names if name.rpartition("_")[0] == stage)
        halves = [_speeds(run, peers, part) for part in (slice(-2 * half, -half), slice(-half, None))]
        for name in peers if len(peers) > 1 else ():
            others = [float(np.median([speeds[peer] for peer in peers if peer != name])) for speeds in halves]
            ratios = [speeds[name] / other for speeds, other in zip(halves, others, strict=True) if other]
            if len(ratios) == 2 and min(ratios) > 0 and max(ratios) < SLOW:
                text = (
                    f"Worker {name} is slow: it makes {percent(ratios[1])} of the real tokens that its peers make "
                    f"in a second of work, over the last {int(run.spans[-SLOW_LINES:].sum())} steps."
                )
                advice = "look at its device: temperature, clock and power, and what else runs there"
                findings.append(Finding(f"slow-worker-{name}", "warning", text, advice))
    return findings


def _speeds(run: History, workers: list[str], part: slice) -> dict[str, float]:
    """Real tokens a second of work; 0 for a worker that did not work."""
    speeds = {}
    for name in workers:
        busy = run.pooled(f"worker/{name}/busy", part)
        speeds[name] = run.pooled(f"worker/{name}/real_tokens_per_s", part) / busy if busy > 0 else 0.0
    return speeds


def _device_count(run: History, stage: str) -> int:
    devices = run.setting("flow", f"{stage}_devices")
    return len(devices) if isinstance(devices, list) else 1


CHECKS: tuple[Callable[[History], list[Finding]], ...] = (
    loss_jitter,
    one_sided_steps,
    skipped_steps,
    gradient_spikes,
    loss_rising,
    learns_nothing,
    leak,
    flat_slots,
    tree_below_chain,
    frozen_norms,
    forwards_differ,
    held_out_below_training,
    coverage,
    supervised_coverage,
    starved_tags,
    padding,
    slow_workers,
    clipping,
    bottleneck,
    trends,
)
