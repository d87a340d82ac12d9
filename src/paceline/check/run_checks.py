"""Checks of the run as a whole: the largest batch for real, memory against the devices, time, cost, split."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.check import memory_budget
from paceline.check.context import CheckContext
from paceline.check.model_checks import weights_bytes
from paceline.check.results import CheckResult
from paceline.check.sample_data import collated
from paceline.checkpoint.checkpoints import steps
from paceline.config import devices_of
from paceline.device import peak_allocated_bytes, peak_resident_bytes, total_bytes
from paceline.drafter import memory
from paceline.drafter.learner import Learner
from paceline.drafter.memory import CARD_SHARE
from paceline.text import duration, size
from paceline.types import FeatureBatch, PlannedStep

LOWER = (
    "lower plan.token_budget for the target, drafter.positions_per_pass or plan.draft_position_budget for the drafter"
)
CLOSE = 1.1
"""A split that is slower than the best by no more than this factor is left alone."""
FILES = 8
"""Files of a checkpoint with its export, at most; and of a run beside them."""
TIMED = (25, 50, 75)
"""Percentiles of the padded tokens at which batches are timed."""


def largest(context: CheckContext) -> list[int]:
    """Places of the batches with most padded tokens and with most draft positions."""
    padded = [batch.padded_tokens for batch in context.batches]
    positions = [batch.draft_positions for batch in context.batches]
    return list(dict.fromkeys([int(np.argmax(padded)), int(np.argmax(positions))]))


def check_plan(context: CheckContext) -> CheckResult:
    """The epoch in figures."""
    plan, share = context.plan, context.material.share
    padded = sum(batch.padded_tokens for batch in context.batches)
    real = sum(batch.real_tokens for batch in context.batches)
    about = "" if context.material.whole else f" (of about {share:.2%} of the rows)"
    detail = (
        f"{plan.num_samples:,} samples in {plan.num_batches:,} micro-batches and {plan.num_windows:,} steps an epoch, "
        f"{real / padded:.1%} of the padded tokens real{about}"
    )
    figures = {"batches": plan.num_batches, "windows": plan.num_windows, "efficiency": real / padded, "share": share}
    if context.material.whole:
        return CheckResult("plan", "pass", detail, figures=figures)
    advice = "`paceline prepare` and `paceline plan` show the whole epoch"
    return CheckResult("plan", "pass", detail, advice, figures)


def check_disk(context: CheckContext) -> CheckResult:
    """Checkpoints and their exports against the free space and the free file entries of the disk."""
    settings, run_dir = context.settings, Path(context.settings.run_dir)
    config, windows = settings.checkpoint, settings.train.epochs * context.plan.num_windows / context.material.share
    total = int(min(windows, settings.train.max_steps or windows))
    # One more than is kept is there while it is written.
    kept = config.keep_last + 1 + (config.keep_best is not None) + total // (config.keep_every or total + 1)
    one = memory.copy_bytes(context.spec, settings.optimizer)
    export = memory.num_parameters(context.spec) * 2 if config.export != "none" else 0
    more = max(1, kept - len(steps(run_dir)))
    needed, files = more * (one + export), more * FILES + FILES
    place = run_dir.absolute()
    while not place.is_dir():
        place = place.parent
    disk = os.statvfs(place)
    free, entries = disk.f_bavail * disk.f_frsize, disk.f_favail if disk.f_files else None
    detail = (
        f"{run_dir}: {more:,} checkpoints of {size(one)}"
        + (f" and exports of {size(export)}" if export else "")
        + f" need {size(needed)}, {size(free)} free"
    )
    figures = {"checkpoint": one, "export": export, "checkpoints": more, "needed": needed, "free": free}
    if needed > free:
        advice = (
            "free space, give another run_dir, or lower checkpoint.keep_last, keep fewer with checkpoint.keep_every"
        )
        return CheckResult("disk", "fail", detail, advice, figures)
    if entries is not None and files > entries:
        detail = f"{run_dir}: about {files} files are made, and the disk has room for {entries} more (inodes)"
        return CheckResult("disk", "fail", detail, "remove files there, or give another run_dir", figures)
    return CheckResult("disk", "pass", detail, figures=figures)


def train_once(context: CheckContext, learner: Learner, index: int, step: int) -> tuple[float, float, FeatureBatch]:
    """Seconds of the target's and of the drafter's work on one batch of the plan, optimizer step included."""
    anchors = context.settings.drafter.num_anchors
    host = collated(context.batches[index], context.material.store, context.facts, context.settings.seed, anchors)
    context.wait()
    began = time.perf_counter()
    features = context.target.features(host, with_last=context.settings.objective.needs_teacher)
    context.wait()
    middle = time.perf_counter()
    learner.accumulate(features)
    learner.step(PlannedStep(step, 0, 0, range(0), save=False))
    context.wait()
    return middle - began, time.perf_counter() - middle, features


def check_memory(context: CheckContext) -> CheckResult:
    """The bytes that the run needs against the devices, and the largest planned batch run for real."""
    settings, places = context.settings, largest(context)
    batches = [context.batches[index] for index in places]
    load = memory_budget.Load(
        max(batch.real_tokens for batch in batches),
        max(batch.padded_tokens for batch in batches),
        max(batch.draft_positions for batch in batches),
    )
    target = memory_budget.target_bytes(weights_bytes(context), context.facts, context.spec, settings, load)
    context.__dict__.pop("learner", None)
    learner = context.new_learner(max(2, len(places)))
    per_pass = learner.settings.positions_per_pass
    drafter = memory_budget.drafter_bytes(context.facts, context.spec, settings, load, per_pass)
    pool = memory_budget.pool_bytes(context.facts, context.spec, settings, load)
    if settings.flow.mode == "pipeline":
        pool += memory_budget.handed_over_bytes(context.facts, settings)
    evaluator = memory_budget.evaluator_bytes(weights_bytes(context), context.spec, settings)
    figures: dict[str, Any] = {"target": target, "drafter": drafter, "evaluator": evaluator, "pool": pool}
    figures["positions_per_pass"] = per_pass
    try:
        for step, index in enumerate(places, start=1):
            train_once(context, learner, index, step)
    except torch.OutOfMemoryError:
        advice = f"target: {_parts(target)}; drafter: {_parts(drafter)}; {LOWER}"
        detail = f"the largest batch ({load.padded:,} padded tokens, {load.positions:,} draft positions) does not fit"
        return CheckResult("memory", "fail", detail, advice, figures)
    planned = memory_budget.by_device(settings, target, drafter, evaluator)
    measured = _peaks(context)
    figures |= {"planned": planned, "measured": measured}
    detail = (
        f"largest batch ran ({load.padded:,} padded tokens, {load.positions:,} draft positions); "
        + "; ".join(
            f"{device} needs {size(needed)} of {size(total_bytes(device))}" for device, needed in planned.items()
        )
        + f"; measured {', '.join(f'{where} {size(held)}' for where, held in measured.items())}"
        + f"; shared memory {size(pool)}"
        + (f"; at most {per_pass:,} draft positions at once" if per_pass is not None else "")
    )
    over = [name for name, needed in planned.items() if name.startswith("cuda") and needed > total_bytes(name)]
    if over:
        advice = f"{', '.join(over)} is too small: target {_parts(target)}; drafter {_parts(drafter)}; {LOWER}"
        return CheckResult("memory", "fail", detail, advice, figures)
    tight = [name for name, needed in planned.items() if needed > CARD_SHARE * total_bytes(name)]
    free = memory_budget.shared_memory()
    if settings.flow.mode == "pipeline" and free is not None and pool > free:
        advice = f"shared memory has {size(free)} free; lower flow.pool_buffers or plan.token_budget, or give it more"
        return CheckResult("memory", "fail", detail, advice, figures)
    if tight:
        advice = f"{', '.join(tight)}: above {CARD_SHARE:.0%}: target {_parts(target)}; drafter {_parts(drafter)}"
        return CheckResult("memory", "warn", detail, advice, figures)
    return CheckResult("memory", "pass", detail, figures=figures)


def _parts(needed: dict[str, int]) -> str:
    return ", ".join(f"{name} {size(held)}" for name, held in needed.items())


def _peaks(context: CheckContext) -> dict[str, int]:
    """Most bytes held, by device; this process's resident memory for the CPU."""
    flow = context.settings.flow
    names = (*devices_of(flow.target_devices[0]), flow.drafter_devices[0])
    peaks = {name: peak_allocated_bytes(name) for name in names if name.startswith("cuda")}
    if not all(name.startswith("cuda") for name in names):
        peaks["this process"] = peak_resident_bytes()
    return peaks


def check_time(context: CheckContext) -> CheckResult:
    """Time of the whole run from a few timed batches."""
    plan, settings = context.plan, context.settings
    order = np.argsort([batch.padded_tokens for batch in context.batches], kind="stable")
    places = list(dict.fromkeys(int(order[int(q / 100 * (len(order) - 1))]) for q in TIMED))
    learner = context.new_learner(len(places) + 1)
    train_once(context, learner, places[0], 1)
    target_s = drafter_s = 0.0
    tokens = positions = 0
    for step, index in enumerate(places, start=2):
        ours, theirs, features = train_once(context, learner, index, step)
        target_s, drafter_s = target_s + ours, drafter_s + theirs
        tokens += int(features.host.lengths.sum())
        positions += features.host.planned.draft_positions
    steps = settings.train.epochs * plan.num_windows / context.material.share
    part = min(1.0, (settings.train.max_steps or steps) / steps)
    epochs = settings.train.epochs * part / context.material.share
    real = epochs * sum(batch.real_tokens for batch in context.batches)
    drafted = epochs * sum(batch.draft_positions for batch in context.batches)
    context.target_s, context.drafter_s = target_s / tokens * real, drafter_s / positions * drafted
    flow = settings.flow
    apart = flow.mode == "pipeline" and not memory_budget.overlapping(
        flow.target_devices, flow.drafter_devices, flow.threads
    )
    targets, drafters = len(flow.target_devices), len(flow.drafter_devices)
    seconds = context.target_s / targets + context.drafter_s / drafters
    if apart:
        seconds = memory_budget.wall_seconds(targets, drafters, context.target_s, context.drafter_s)
    spread = {device for worker in flow.target_devices for device in devices_of(worker)}
    devices = len({*spread, *flow.drafter_devices})
    figures = {
        "target_tokens_per_s": tokens / target_s,
        "draft_positions_per_s": positions / drafter_s,
        "seconds": seconds,
        "device_hours": devices * seconds / 3600,
    }
    detail = (
        f"about {duration(seconds)}: target {tokens / target_s:,.0f} tokens/s, drafter {positions / drafter_s:,.0f} "
        f"positions/s a device, {real:,.0f} tokens; {devices * seconds / 3600:.2f} device hours"
    )
    if context.limits.price is not None:
        figures["cost"] = devices * seconds / 3600 * context.limits.price
        detail += f", cost {figures['cost']:,.2f}"
    if not context.material.whole:
        detail += "; estimated from some rows"
    return CheckResult("time", "pass", detail, figures=figures)


def check_split(context: CheckContext) -> CheckResult:
    """Whether the devices are split between the roles as their work is."""
    flow = context.settings.flow
    targets, drafters = len(flow.target_devices), len(flow.drafter_devices)
    share = context.target_s / (context.target_s + context.drafter_s)
    if flow.mode == "inline" or memory_budget.overlapping(flow.target_devices, flow.drafter_devices, flow.threads):
        detail = f"the target does {share:.0%} of the work; both roles take turns on the same processors"
        return CheckResult("split", "pass", detail, figures={"target_share": share})
    ours = memory_budget.wall_seconds(targets, drafters, context.target_s, context.drafter_s)
    per_target = len(devices_of(flow.target_devices[0]))
    best = memory_budget.best_split(targets * per_target + drafters, context.target_s, context.drafter_s, per_target)
    slower = "target" if context.target_s / targets > context.drafter_s / drafters else "drafter"
    detail = f"{targets} target, {drafters} drafter; the {slower} stage will be the bottleneck"
    figures = {"target_share": share, "best_targets": best.targets, "best_drafters": best.drafters}
    if ours <= CLOSE * best.seconds:
        return CheckResult("split", "pass", detail, figures=figures)
    advice = (
        f"{best.targets} flow.target_devices and {best.drafters} flow.drafter_devices would be "
        f"{ours / best.seconds:.1f}x as fast (the number of drafter ranks also multiplies the micro-batches of a step)"
    )
    return CheckResult("split", "warn", detail, advice, figures)
