"""What a run's numbers say, in sentences: bottleneck, jumps of the loss, trend, and signs that something is wrong.

Each check is a function from a history to findings; `diagnose` runs them all. Thresholds stand beside the checks with
the reason for them. A finding of level ``warning`` is also told while the run goes on, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paceline.observe.history import History
from paceline.observe.jitter import explain_jitter
from paceline.observe.numerals import percent, short, signed
from paceline.observe.spikes import limit_of
from paceline.observe.trend import trend_of

MIN_LINES = 20
"""Fewer lines than this are not judged."""


@dataclass(frozen=True)
class Finding:
    """One thing that the numbers say.

    Attributes:
        key: stable name; a warning is told once a run.
        level: ``warning`` for what should be looked at, ``info`` for what is worth knowing.
        text: what was seen, with figures.
        advice: what to do about it; empty where nothing is to be done.
    """

    key: str
    level: Literal["info", "warning"]
    text: str
    advice: str = ""

    @property
    def sentence(self) -> str:
        """What was seen and what to do, for one line of a terminal."""
        return f"{self.text} {self.advice[0].upper()}{self.advice[1:]}." if self.advice else self.text


def diagnose(run: History) -> list[Finding]:
    """All findings, warnings first."""
    if run.steps.size < MIN_LINES:
        return []
    findings = [finding for check in CHECKS for finding in check(run)]
    return sorted(findings, key=lambda finding: finding.level == "info")


def loss_jitter(run: History) -> list[Finding]:
    """Whether the make-up of the window moves the loss."""
    found = explain_jitter(run)
    if found is None or not found.notable:
        return []
    schedule = _setting(run, "plan", "schedule")
    by_length = not found.leader.startswith("tag ")
    kinds = "lengths" if by_length else "tags"
    if not by_length:
        advice = "raise plan.accumulate, so that a window spans more kinds of samples"
    elif schedule == "stratified":
        advice = "raise plan.accumulate, so that a window spans more lengths"
    else:
        advice = "plan.schedule: stratified would remove most of it"
    return [
        Finding(
            "loss-jitter",
            "warning",
            f"{percent(found.explained)} of the variance of the step loss comes from which {kinds} a step holds, "
            f"chiefly the share of {found.leader} (alone {percent(found.leader_share)}; from none to all of it the "
            f"loss moves by {signed(found.slope, 2)} nat). "
            f"The loss scatters by ±{percent(found.relative)} around its trend.",
            advice,
        )
    ]


def one_sided_steps(run: History) -> list[Finding]:
    """Steps that held samples of one bucket only, though they had several micro-batches."""
    buckets = run.numbers("samples/bucket_{bucket}")
    if len(buckets) < 2:
        return []
    counts = np.array([run.counts(f"samples/bucket_{bucket}") for bucket in buckets])
    total = counts.sum(axis=0)
    lonely = (counts.max(axis=0) >= total) & (run.counts("window/micro_batches") > 1) & (total > 0)
    share = float(np.mean(lonely))
    # A tenth of the steps is far beyond the one short window at the end of an epoch.
    if share < 0.1:
        return []
    most = buckets[int(np.argmax(counts[:, lonely].sum(axis=1)))]
    return [
        Finding(
            "one-sided-steps",
            "warning",
            f"{percent(share)} of the steps saw samples of one length bucket only, most often bucket {most}, "
            f"although there are {len(buckets)} buckets.",
            "use plan.schedule: stratified, or raise plan.accumulate",
        )
    ]


def bottleneck(run: History) -> list[Finding]:
    """Which stage sets the pace, and what would move it."""
    names = sorted({name.split("/")[1] for name in run.values if name.startswith("stage/")})
    busy = {name: run.pooled(f"stage/{name}/busy") for name in names}
    busy = {name: share for name, share in busy.items() if np.isfinite(share)}
    if len(busy) < 2:
        return []
    slowest = max(busy, key=lambda name: busy[name])
    shares = ", ".join(f"{name} {percent(share)}" for name, share in busy.items())
    if _setting(run, "flow", "mode") == "inline" or sum(busy.values()) <= 1.02:
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
    good = norm[np.isfinite(norm)]
    if good.size < MIN_LINES:
        return []
    middle, limit = limit_of(good)
    spikes = np.flatnonzero(np.isfinite(norm) & (norm > limit))
    # The first steps have large gradients of their own.
    spikes = spikes[run.steps[spikes] > max(20, run.total_steps // 20)]
    if not spikes.size:
        return []
    worst = spikes[np.argsort(norm[spikes])[::-1][:5]]
    places = "; ".join(f"{_place(run, int(i))}: {short(float(norm[i]))}" for i in worst)
    text = f"{spikes.size} gradient spikes above {short(limit)} (median {short(middle)}): {places}."
    return [Finding("gradient-spikes", "warning", text, "look at the samples of these batches")]


def _place(run: History, line: int) -> str:
    """Where a spike happened; with its samples, those of highest loss first, where it was noted while training."""
    step = int(run.steps[line])
    place: dict[str, Any] = {"epoch": run.epochs[line], "window": run.windows[line], "batches": run.batches[line]}
    for event in run.events:
        if event.event == "gradient-spike" and step - run.spans[line] < event.step <= step:
            step, place = event.step, event.fields
            break
    parts = [f"epoch {place.get('epoch')}, window {place.get('window')}, batches {_ranges(place.get('batches') or [])}"]
    highest, samples = place.get("highest_loss") or {}, place.get("samples") or []
    if highest:
        parts.append("highest loss: " + ", ".join(f"sample {row} with {loss:.2f}" for row, loss in highest.items()))
    if samples:
        parts.append(f"samples {_ranges(samples[:12])}" + (f" and {len(samples) - 12} more" * (len(samples) > 12)))
    return f"step {step} ({'; '.join(parts)})"


def starved_tags(run: History) -> list[Finding]:
    """Tags whose samples are many and whose say in the loss is next to nothing."""
    whole, samples = run.weights.get("loss"), float(np.sum(run.counts("window/samples") * run.spans))
    if whole is None or not samples:
        return []
    starved = []
    for tag in run.tags:
        weight = run.weights.get(f"loss/tag_{tag}")
        share = float(np.sum(run.counts(f"samples/tag_{tag}") * run.spans)) / samples
        of_weight = float(np.nansum(weight) / np.nansum(whole)) if weight is not None else 1.0
        # Short answers weigh less by nature; a fifth of a sample's say is more than that.
        if share >= 0.02 and of_weight < 0.2 * share:
            starved.append(f"{tag} ({percent(share)} of the samples, {percent(of_weight)} of the loss weight)")
    if not starved:
        return []
    text = f"Starved tags: {'; '.join(starved[:5])}."
    advice = "objective.weighting: sample lets every sample count the same, plan.weights shows some more often"
    return [Finding("starved-tags", "warning", text, advice)]


def supervised_coverage(run: History) -> list[Finding]:
    """Answers of which blocks cover only a part, over all epochs together."""
    share, epochs = run.pooled("coverage/supervised"), _setting(run, "train", "epochs")
    if run.status == "finished" or not isinstance(epochs, int):
        epochs = int(run.epochs[-1]) + 1
    if not share * epochs < 0.5:
        return []
    text = f"Blocks cover {percent(share)} of the supervised tokens an epoch, {percent(share * epochs)} over the run."
    return [Finding("supervised-coverage", "warning", text, "raise drafter.num_anchors or train.epochs")]


def skipped_steps(run: History) -> list[Finding]:
    """Steps without an update, and losses that are no numbers."""
    skipped = float(np.sum(run.counts("gradient/skipped") * run.spans))
    if not skipped:
        return []
    where = run.steps[run.counts("gradient/skipped") > 0]
    return [
        Finding(
            "skipped-steps",
            "warning",
            f"{skipped:.0f} steps were skipped for a gradient that is not finite, first at step {where[0]}.",
            "lower optimizer.lr or look at the samples of that step",
        )
    ]


def clipping(run: History) -> list[Finding]:
    """Clipping of nearly every step turns the clip norm into the step size."""
    share = run.pooled("gradient/clipped", slice(run.steps.size // 4, None))
    if not share > 0.9:
        return []
    text = f"{percent(share)} of the gradients were clipped after the first quarter of the run."
    return [Finding("clipping", "warning", text, "raise optimizer.clip_norm or lower optimizer.lr")]


def padding(run: History) -> list[Finding]:
    """More than a fifth of the target's work on padding."""
    share = run.pooled("padding_efficiency")
    if not share < 0.8:
        return []
    text = f"Only {percent(share)} of the target's tokens are real, the rest is padding."
    if _setting(run, "plan", "strategy") == "grid":
        advice = "lower plan.width_multiple; small data or a small plan.token_budget leave the grid little choice"
    else:
        advice = "plan.strategy: grid wastes least"
    return [Finding("padding", "warning", text, advice)]


def leak(run: History) -> list[Finding]:
    """A drafter that predicts nearly everything after a tenth of the run has seen the answers."""
    early = slice(0, max(run.steps.size // 10, MIN_LINES // 2))
    if run.total_steps and run.steps[early][-1] > 0.2 * run.total_steps:
        return []
    loss, accuracy = run.pooled("loss", early), run.pooled("accuracy/all", early)
    if not (loss < 0.3 or accuracy > 0.95):
        return []
    last = run.steps[early][-1]
    text = f"Loss {loss:.2f} over the first {last} steps is too good to be true: labels may leak into inputs."
    return [Finding("leak", "warning", text, "run the pre-flight check of the drafter's mask, and look at the data")]


def flat_slots(run: History) -> list[Finding]:
    """Later slots must be harder: they do not know their predecessors. Equal accuracy means that they see them."""
    slots = run.numbers("accuracy/slot_{slot}")
    late = slice(-max(run.steps.size // 10, 1), None)
    if len(slots) < 4:
        return []
    first, last = run.pooled(f"accuracy/slot_{slots[0]}", late), run.pooled(f"accuracy/slot_{slots[-1]}", late)
    if not (first > 0.2 and last > 0.97 * first):
        return []
    text = (
        f"Accuracy does not fall over the slots (slot {slots[0]} {percent(first)}, slot {slots[-1]} {percent(last)})."
    )
    return [Finding("flat-slots", "warning", text, "check that slots see neither their labels nor later context")]


def tree_below_chain(run: History) -> list[Finding]:
    """A tree holds the chain; where it accepts less, the drafter's probabilities are off."""
    late = slice(-max(run.steps.size // 10, 1), None)
    chain = run.pooled("tau", late)
    findings = []
    for nodes in run.numbers("tree/tau_{nodes}"):
        tree = run.pooled(f"tree/tau_{nodes}", late)
        if tree < chain:
            text = f"The draft tree of {nodes} nodes accepts less (τ {tree:.2f}) than the chain (τ {chain:.2f})."
            findings.append(Finding(f"tree-{nodes}", "warning", text, "calibrate the drafter: its temperature is off"))
    return findings


def frozen_norms(run: History) -> list[Finding]:
    """Norm weights that never move: master weights or moments in a type that swallows the updates."""
    share = run.series("norms/unmoved")[run.steps >= 200]
    share = share[np.isfinite(share)]
    if not share.size or share[-1] <= 0.01:
        return []
    text = f"{percent(float(share[-1]))} of the norm weights still have their first value after {run.steps[-1]} steps."
    return [Finding("frozen-norms", "warning", text, "check that master weights and moments are float32")]


def coverage(run: History) -> list[Finding]:
    """Samples of a finished epoch that were never trained."""
    share = run.series("progress/epoch_coverage")
    ends = np.flatnonzero(np.diff(run.epochs) > 0)
    shares = share[ends][np.isfinite(share[ends])]
    if not shares.size or shares.min() >= 0.98:
        return []
    text = f"An epoch ended with {percent(float(shares.min()))} of its samples trained."
    return [Finding("coverage", "warning", text, "look at what the plan leaves out: `paceline plan`")]


def decoded_below_training(run: History) -> list[Finding]:
    """Training τ must be what serving gets: see whether decoding agrees."""
    findings = []
    for entry in run.evaluations[-1:]:
        decoded, step = entry.get("tau_micro", entry.get("tau")), entry.get("step")
        near = np.flatnonzero(run.steps <= step)[-max(run.steps.size // 20, 5) :] if isinstance(step, int) else []
        if not isinstance(decoded, (int, float)) or not len(near):
            continue
        training = run.pooled("tau", slice(int(near[0]), int(near[-1]) + 1))
        if decoded < 0.75 * training:
            text = f"Decoding gets τ {decoded:.2f} where training reports {training:.2f} at step {step}."
            advice = "training and serving differ: compare the prompts, the template and the forward passes"
            findings.append(Finding("decoded-below-training", "warning", text, advice))
    return findings


def trends(run: History) -> list[Finding]:
    """Whether loss and τ still move over the last part of the run."""
    findings = []
    for name, word, unit in (("loss", "loss", "nat"), ("tau", "training τ", "tokens")):
        trend = trend_of(run.steps, run.series(name))
        if trend is None:
            continue
        change, error = trend.slope * trend.steps, trend.error * trend.steps
        better = trend.direction == ("falling" if name == "loss" else "rising")
        advice = "more steps would help" if better and run.status == "finished" else ""
        moved = f"{signed(change, 3)} ± {error:.3f} {unit}"
        text = f"The {word} is {trend.text}: {moved} over the last {trend.steps} steps (95 %)."
        findings.append(Finding(f"trend-{name}", "info", text, advice))
    return findings


CHECKS: tuple[Callable[[History], list[Finding]], ...] = (
    loss_jitter,
    one_sided_steps,
    skipped_steps,
    gradient_spikes,
    leak,
    flat_slots,
    tree_below_chain,
    frozen_norms,
    decoded_below_training,
    coverage,
    supervised_coverage,
    starved_tags,
    padding,
    clipping,
    bottleneck,
    trends,
)


def _setting(run: History, section: str, name: str) -> Any:
    """A resolved setting of the run; None where the settings are not there."""
    values = run.settings.get(section)
    return values.get(name) if isinstance(values, dict) else None


def _device_count(run: History, stage: str) -> int:
    devices = _setting(run, "flow", f"{stage}_devices")
    return len(devices) if isinstance(devices, list) else 1


def _ranges(numbers: list[int]) -> str:
    """``[3, 4, 5, 9]`` → ``3–5, 9``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}–{high}" if high > low else str(low) for low, high in parts)
