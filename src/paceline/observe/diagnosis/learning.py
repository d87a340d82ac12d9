"""Checks of whether the drafter learns, and learns what serving asks of it. Each goes from a history to findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.observe.diagnosis.finding import MIN_LINES, Finding, setting
from paceline.observe.diagnosis.trend import trend_of
from paceline.observe.run_files import number
from paceline.observe.run_history import History
from paceline.text import percent, signed

AGREEMENT = 0.02
"""Share of the decode loop's τ by which the training forward's may differ on the same blocks."""
CHANCE = 0.05
"""First drafts that are right this seldom: the commonest token of most texts alone is right about as often."""


def loss_rising(run: History) -> list[Finding]:
    """A loss that climbs over the last part of the run, by more than its noise."""
    trend = trend_of(run.steps, run.series("loss"))
    level = abs(run.pooled("loss"))
    # By a hundredth at the least, and the interval's near end is meant: one look in forty would be wrong otherwise.
    if trend is None or not (trend.slope - trend.error) * trend.steps > 0.01 * level:
        return []
    change, error = trend.slope * trend.steps, trend.error * trend.steps
    text = f"The loss rises: {signed(change, 3)} ± {error:.3f} nat over the last {trend.steps} steps (95 %)."
    if setting(run, "plan", "schedule") == "curriculum":
        advice = "compare loss/bucket: a curriculum moves the mixture; if they rise too, lower optimizer.lr"
    else:
        advice = "lower optimizer.lr or lengthen optimizer.warmup, and look at what the data is from there on"
    return [Finding("loss-rising", "warning", text, advice)]


def learns_nothing(run: History) -> list[Finding]:
    """A loss that is where it began, or that stays where guessing the commonest tokens gets it."""
    warm = setting(run, "optimizer", "warmup")
    warm_steps = min(number(warm) or 0.0, 1.0) * run.total_steps
    loss = run.series("loss")
    if run.steps.size < 4 or run.steps[-1] < max(50.0, warm_steps):
        return []
    size = run.steps.size
    late = slice(size - max(size // 4, 1), None)
    now, first = run.pooled("loss", late), run.pooled("loss", slice(0, max(size // 10, 1)))
    slots = run.numbers("accuracy/slot_{slot}")
    accuracy = run.pooled(f"accuracy/slot_{slots[0]}", late) if slots else run.pooled("accuracy/all", late)
    from_start = run.steps[0] == run.spans[0]
    half = slice(size // 2, None)
    trend = trend_of(run.steps[half], loss[half], part=1.0)
    # A fall of less than a hundredth over half a run, seen with some certainty.
    stands = trend is not None and (-trend.slope - trend.error) * trend.steps < 0.01 * abs(now)
    # A run that begins with learnt weights may well stay where it is.
    if from_start and now > 0.98 * first and (accuracy < CHANCE or not setting(run, "drafter", "init")):
        where = f"loss {first:.2f} in the first steps, {now:.2f} now (step {run.steps[-1]})"
    elif stands and accuracy < CHANCE and run.steps[-1] >= max(100.0, 2 * warm_steps):
        where = f"the loss stays at {now:.2f} up to step {run.steps[-1]}"
    else:
        return []
    right = f", and the first draft of a block is right {percent(accuracy)} of the time" if accuracy < CHANCE else ""
    advice = "raise optimizer.lr, and check with `paceline check` that it can learn one batch by heart"
    return [Finding("learns-nothing", "warning", f"The drafter learns nothing: {where}{right}.", advice)]


def leak(run: History) -> list[Finding]:
    """A drafter that predicts nearly everything after a tenth of the run has seen the answers."""
    if run.steps.size < MIN_LINES:
        return []
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
    advice = "check that slots see neither their labels nor later context"
    if last > 0.9:
        advice = f"where the run has learnt its few samples by heart that is no wonder; if not, {advice}"
    return [Finding("flat-slots", "warning", text, advice)]


def tree_below_chain(run: History) -> list[Finding]:
    """A tree holds the chain; where it accepts less, the drafter's probabilities are off."""
    late = slice(-max(run.steps.size // 10, 1), None)
    drafts = max(run.numbers("accuracy/slot_{slot}"), default=0)
    findings = []
    for nodes in run.numbers("tree/tau_{nodes}"):
        name = f"tree/tau_{nodes}"
        measured = np.flatnonzero(np.isfinite(run.series(name)))
        measured = measured[measured >= late.indices(run.steps.size)[0]]
        tree, chain = run.pooled(name, measured), run.pooled("tau", measured)
        # Trees are measured now and then: a line of several steps has a chain of other blocks too.
        margin = 1.0 if run.line == "step" else 0.95
        # A tree of fewer nodes than a block has drafts may end before the chain does.
        if nodes >= drafts and tree < margin * chain:
            text = f"The draft tree of {nodes} nodes accepts less (τ {tree:.2f}) than the chain (τ {chain:.2f})."
            findings.append(Finding(f"tree-{nodes}", "warning", text, "calibrate the drafter: its temperature is off"))
    return findings


def decoded_below_training(run: History) -> list[Finding]:
    """Training τ must be what serving gets: see whether decoding agrees."""
    findings = []
    for entry in run.evaluations[-1:]:
        decoded, step = number(entry.get("tau_micro", entry.get("tau"))), entry["step"]
        near = np.flatnonzero(run.steps <= step)[-max(run.steps.size // 20, 5) :]
        if decoded is None or not len(near):
            continue
        training = run.pooled("tau", slice(int(near[0]), int(near[-1]) + 1))
        if decoded < 0.75 * training:
            text = f"Decoding gets τ {decoded:.2f} where training reports {training:.2f} at step {step}."
            if agrees(entry):
                advice = (
                    "the forward passes agree, so the data differ: held-out prompts are not like the trained samples"
                )
            else:
                advice = "training and serving differ: compare the prompts, the template and the forward passes"
            findings.append(Finding("decoded-below-training", "warning", text, advice))
    return findings


def training_against_decoding(run: History) -> list[Finding]:
    """τ of the training forward on the very blocks that were decoded: the promise that training serves."""
    found = [(entry, agrees(entry)) for entry in run.evaluations[-1:]]
    return [
        Finding(
            "training-against-decoding",
            "warning",
            f"On the blocks of the prompts decoded at step {entry['step']}, the training forward counts τ "
            f"{number(entry.get('training_tau')) or 0.0:.3f} and decoding {number(entry.get('tau_micro')) or 0.0:.3f}: "
            f"more than {AGREEMENT * 100:.0f} % apart.",
            "training and inference forwards differ, so what training reports is not served: run `paceline check`",
        )
        for entry, same in found
        if same is False
    ]


def agrees(entry: Mapping[str, Any]) -> bool | None:
    """Whether an evaluation's training forward and decode loop count the same τ; None where it was not measured."""
    training, decoded, said = (
        number(entry.get("training_tau")),
        number(entry.get("tau_micro")),
        entry.get("training_agrees"),
    )
    if training is None or decoded is None:
        return None
    return said if isinstance(said, bool) else abs(training - decoded) <= AGREEMENT * decoded


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
