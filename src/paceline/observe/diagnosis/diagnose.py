"""What a run's numbers say, in sentences: bottleneck, jumps of the loss, trend, and signs that something is wrong.

Each check is a function from a history to findings; `diagnose` runs them all. Thresholds stand beside the checks with
the reason for them. A finding of level ``warning`` is also told while the run goes on, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.observe.diagnosis.finding import MIN_LINES, Finding, ranges, setting
from paceline.observe.diagnosis.gradient_spikes import spikes_of
from paceline.observe.diagnosis.learning import (
    decoded_below_training,
    flat_slots,
    leak,
    learns_nothing,
    loss_rising,
    training_against_decoding,
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
from paceline.observe.run_files import number, shortened, whole_numbers
from paceline.observe.run_history import History
from paceline.text import percent, short

MIN_STEPS = 20
"""Runs of fewer optimizer steps are not judged."""


def diagnose(run: History) -> list[Finding]:
    """All findings, warnings first."""
    if run.spans.sum() < MIN_STEPS:
        return []
    findings = [finding for check in CHECKS for finding in check(run)]
    return sorted(findings, key=lambda finding: finding.level == "info")


def bottleneck(run: History) -> list[Finding]:
    """Which stage sets the pace, and what would move it."""
    names = sorted({name.split("/")[1] for name in run.values if name.startswith("stage/")})
    busy = {name: run.pooled(f"stage/{name}/busy") for name in names}
    busy = {name: share for name, share in busy.items() if np.isfinite(share)}
    if len(busy) < 2:
        return []
    slowest = max(busy, key=lambda name: busy[name])
    shares = ", ".join(f"{name} {percent(share)}" for name, share in busy.items())
    if setting(run, "flow", "mode") == "inline" or sum(busy.values()) <= 1.02:
        gain = sum(busy.values()) / busy[slowest]
        return [
            Finding(
                "bottleneck",
                "info",
                f"The stages take turns; busy: {shares}.",
                f"flow.mode: pipeline overlaps them, at best {gain:.1f} times as fast on devices of their own",
            )
        ]
    if busy[slowest] < 0.7:
        return [
            Finding(
                "bottleneck",
                "info",
                f"No stage is busy most of its time ({shares}): batches are made or handed over too slowly.",
                "raise flow.prefetch_batches and flow.pool_buffers",
            )
        ]
    if slowest == "feed":
        text = (
            f"The feed is the bottleneck: one thread that reads and pads is busy {percent(busy[slowest])} of its time."
        )
        return [Finding("bottleneck", "info", text, "put the store on a faster disk, or in memory")]
    idle = ", ".join(f"the {name} waits {percent(1 - share)}" for name, share in busy.items() if name != slowest)
    others = [name for name in busy if name != slowest and _device_count(run, name) > 1]
    if others and busy[others[0]] < 0.8:
        advice = f"move a device from flow.{others[0]}_devices to flow.{slowest}_devices"
    else:
        advice = f"add a device to flow.{slowest}_devices" + (", or lower drafter.num_anchors" * (slowest == "drafter"))
    return [
        Finding(
            "bottleneck",
            "info",
            f"The {slowest} is the bottleneck: busy {percent(busy[slowest])} of its time, while {idle}.",
            advice,
        )
    ]


def gradient_spikes(run: History) -> list[Finding]:
    """Steps whose gradient norm stands far above its neighbourhood, with the place in the plan."""
    norm = run.series("gradient/norm_max")
    good = np.flatnonzero(np.isfinite(norm))
    if good.size < MIN_LINES:
        return []
    spikes, usual = spikes_of(norm[good])
    spikes = good[spikes]
    # The first steps have large gradients of their own.
    late = run.steps[spikes] > max(20, run.total_steps // 20)
    spikes, usual = spikes[late], usual[late]
    if not spikes.size:
        return []
    worst = np.argsort(norm[spikes] / usual)[::-1][:5]
    places = "; ".join(
        f"{_place(run, int(spikes[i]))}: {short(float(norm[spikes[i]]))}, usual there {short(float(usual[i]))}"
        for i in worst
    )
    text = f"{spikes.size} gradient spike{'s' * (spikes.size > 1)}: {places}."
    return [Finding("gradient-spikes", "warning", text, "look at the samples of these batches")]


def _place(run: History, line: int) -> str:
    """Where a spike happened; with its samples, those of highest loss first, where it was noted while training."""
    step = int(run.steps[line])
    place: dict[str, Any] = {"epoch": int(run.epochs[line]), "window": int(run.windows[line])}
    place["batches"] = run.batches[line]
    for event in run.events:
        if event.event == "gradient-spike" and step - run.spans[line] < event.step <= step:
            step, place = event.step, event.fields
            break
    at = [f"{name} {place[name]}" for name in ("epoch", "window") if isinstance(place.get(name), int)]
    parts = [", ".join([*at, f"batches {_shown(whole_numbers(place.get('batches')))}"])]
    highest = place.get("highest_loss")
    found = {row: number(loss) for row, loss in highest.items()} if isinstance(highest, dict) else {}
    losses = [f"sample {shortened(row, 20)} with {loss:.2f}" for row, loss in found.items() if loss is not None]
    if losses:
        parts.append("highest loss: " + ", ".join(losses[:3]))
    samples = whole_numbers(place.get("samples"))
    if samples:
        parts.append(f"samples {_shown(samples)}")
    return f"step {step} ({'; '.join(parts)})"


def _shown(numbers: list[int], most: int = 12) -> str:
    """The first of the numbers, and how many more there are."""
    return ranges(numbers[:most]) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")


def skipped_steps(run: History) -> list[Finding]:
    """Steps without an update, and losses that are no numbers."""
    skipped = float(np.sum(run.counts("gradient/skipped") * run.spans))
    if not skipped:
        return []
    count = f"{skipped:.0f} {'steps were' if skipped > 1.5 else 'step was'}"
    first = int(np.flatnonzero(run.counts("gradient/skipped") > 0)[0])
    where = ranges(list(range(run.steps[first] - run.spans[first] + 1, run.steps[first] + 1)))
    return [
        Finding(
            "skipped-steps",
            "warning",
            f"{count} skipped for a gradient that is not finite, first at step {where}.",
            "lower optimizer.lr or look at the samples of that step",
        )
    ]


def clipping(run: History) -> list[Finding]:
    """Clipping of nearly every step: no error, for the optimizers' steps do not grow with the gradient's scale."""
    share = run.pooled("gradient/clipped", slice(run.steps.size // 4, None))
    if run.steps.size < 4 or not share > 0.9:
        return []
    text = f"{percent(share)} of the gradients were clipped after the first quarter of the run."
    return [Finding("clipping", "info", text, "raise optimizer.clip_norm if it is to catch outliers only")]


def frozen_norms(run: History) -> list[Finding]:
    """Norm weights that never move: master weights or moments in a type that swallows the updates."""
    share = run.series("norms/unmoved")[run.steps >= 200]
    share = share[np.isfinite(share)]
    if not share.size or share[-1] <= 0.01:
        return []
    text = f"{percent(float(share[-1]))} of the norm weights still have their first value after {run.steps[-1]} steps."
    return [Finding("frozen-norms", "warning", text, "check that master weights and moments are float32")]


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
    training_against_decoding,
    decoded_below_training,
    coverage,
    supervised_coverage,
    starved_tags,
    padding,
    clipping,
    bottleneck,
    trends,
)


def _device_count(run: History, stage: str) -> int:
    devices = setting(run, "flow", f"{stage}_devices")
    return len(devices) if isinstance(devices, list) else 1
