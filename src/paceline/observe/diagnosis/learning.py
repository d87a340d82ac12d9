"""Checks of whether the drafter learns, and whether it learns what serving needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.observe.diagnosis import MIN_LINES, Finding
from paceline.observe.run_history import History, last_part
from paceline.text import percent, signed

AGREEMENT = 0.02
"""Share of the decode loop's τ by which the training forward's may differ on the same blocks."""
CHANCE = 0.05
"""First drafts that are right this seldom: the commonest token of most texts alone is right about as often."""
BLOCKS = 12
"""Stretches whose means are regressed: neighboring steps are correlated, means of long stretches hardly are."""
MIN_POINTS = 8
"""Fewer points than this have no trend; so many are regressed in stretches of two."""
T_QUANTILES = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
"""97.5 % quantiles of Student's t by degrees of freedom: stretches less two."""


@dataclass(frozen=True)
class Trend:
    """A straight line through the last part of a series, with how sure its slope is.

    Attributes:
        steps: optimizer steps that it spans.
        slope: change a step.
        error: half width of the 95 % interval of the slope.
    """

    steps: int
    slope: float
    error: float

    @property
    def direction(self) -> str:
        """``falling``, ``rising`` or ``flat``: flat unless the interval excludes zero."""
        if abs(self.slope) <= self.error:
            return "flat"
        return "rising" if self.slope > 0 else "falling"

    def moved(self, unit: str) -> str:
        """``−0.120 ± 0.030 nat over the last 300 steps (95 %)``."""
        change, error = self.slope * self.steps, self.error * self.steps
        return f"{signed(change, 3)} ± {error:.3f} {unit} over the last {self.steps} steps (95 %)"


def trend_of(steps: np.ndarray, values: np.ndarray, part: float = 0.3) -> Trend | None:
    """Trend of the last ``part`` of a series.

    Args:
        steps: ascending, [n].
        values: [n], NaN allowed.
        part: share of the points.

    Returns:
        None where there are fewer than `MIN_POINTS` points. Of short series at least half is taken.
    """
    good = np.isfinite(values)
    steps, values = steps[good], values[good]
    count = max(int(steps.size * part), min(max(steps.size // 2, MIN_POINTS), 2 * BLOCKS))
    if steps.size < MIN_POINTS:
        return None
    blocks = min(BLOCKS, count // 2)
    x = np.array([part.mean() for part in np.array_split(steps[-count:].astype(np.float64), blocks)])
    y = np.array([part.mean() for part in np.array_split(values[-count:], blocks)])
    centered = x - x.mean()
    slope = float(centered @ y / (centered @ centered))
    rest = y - y.mean() - slope * centered
    error = T_QUANTILES[blocks - 2] * float(np.sqrt(rest @ rest / (blocks - 2) / (centered @ centered)))
    return Trend(int(steps[-1] - steps[-count] + 1), slope, error)


def trends(run: History) -> list[Finding]:
    """Whether loss and τ still move over the last part of the run."""
    findings = []
    for name, word, unit in (("loss", "loss", "nat"), ("tau", "training τ", "tokens")):
        trend = trend_of(run.steps, run.series(name))
        if trend is None:
            continue
        better = trend.direction == ("falling" if name == "loss" else "rising")
        advice = "more steps would help" if better and run.status == "finished" else ""
        still = "flat" if trend.direction == "flat" else f"still {trend.direction}"
        findings.append(Finding(f"trend-{name}", "info", f"The {word} is {still}: {trend.moved(unit)}.", advice))
    return findings


def loss_rising(run: History) -> list[Finding]:
    """A loss that climbs over the last part of the run, by more than its noise."""
    trend = trend_of(run.steps, run.series("loss"))
    level = abs(run.pooled("loss"))
    # By a hundredth at the least, and the interval's near end is meant: one look in forty would be wrong otherwise.
    if trend is None or not (trend.slope - trend.error) * trend.steps > 0.01 * level:
        return []
    if run.setting("plan", "schedule") == "curriculum":
        advice = "compare loss/bucket: a curriculum moves the mixture; if they rise too, lower optimizer.lr"
    else:
        advice = "lower optimizer.lr or lengthen optimizer.warmup, and look at what the data is from there on"
    return [Finding("loss-rising", "warning", f"The loss rises: {trend.moved('nat')}.", advice)]


def learns_nothing(run: History) -> list[Finding]:
    """A loss that is where it began, or that stays where guessing the commonest tokens gets it."""
    warm_steps = (run.setting("optimizer", "warmup") or 0.0) * run.total_steps
    loss, size = run.series("loss"), run.steps.size
    if size < 4 or run.steps[-1] < max(50.0, warm_steps):
        return []
    late = last_part(run, 0.25)
    now, first = run.pooled("loss", late), run.pooled("loss", slice(0, max(size // 10, 1)))
    slots = run.numbers("accuracy/slot_{slot}")
    accuracy = run.pooled(f"accuracy/slot_{slots[0]}" if slots else "accuracy/all", late)
    half = slice(size // 2, None)
    trend = trend_of(run.steps[half], loss[half], part=1.0)
    # A fall of less than a hundredth over half a run, seen with some certainty.
    flat = trend is not None and (-trend.slope - trend.error) * trend.steps < 0.01 * abs(now)
    from_start = run.steps[0] == run.spans[0]
    # A run that begins with learnt weights may well stay where it is.
    if from_start and now > 0.98 * first and (accuracy < CHANCE or not run.setting("drafter", "init")):
        where = f"loss {first:.2f} in the first steps, {now:.2f} now (step {run.steps[-1]})"
    elif flat and accuracy < CHANCE and run.steps[-1] >= max(100.0, 2 * warm_steps):
        where = f"the loss stays at {now:.2f} up to step {run.steps[-1]}"
    else:
        return []
    right = f", and the first draft of a block is right {percent(accuracy)} of the time" if accuracy < CHANCE else ""
    advice = (
        f"raise optimizer.lr, and run `paceline check {run.run_dir}`: it says whether the drafter can learn a batch"
    )
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
    advice = f"run `paceline check {run.run_dir}`, which tests the drafter's mask, and look at the data"
    return [Finding("leak", "warning", text, advice)]


def flat_slots(run: History) -> list[Finding]:
    """Later slots must be harder: they do not know their predecessors. Equal accuracy means that they see them."""
    slots = run.numbers("accuracy/slot_{slot}")
    late = last_part(run)
    if len(slots) < 4:
        return []
    first, last = run.pooled(f"accuracy/slot_{slots[0]}", late), run.pooled(f"accuracy/slot_{slots[-1]}", late)
    if not (first > 0.2 and last > 0.97 * first):
        return []
    text = (
        f"Accuracy does not fall over the slots (slot {slots[0]} {percent(first)}, slot {slots[-1]} {percent(last)})."
    )
    advice = f"run `paceline check {run.run_dir}`: slots must see neither their labels nor later context"
    if last > 0.9:
        advice = f"a run that has memorized its few samples may look so; if this one has not, {advice}"
    return [Finding("flat-slots", "warning", text, advice)]


def tree_below_chain(run: History) -> list[Finding]:
    """A tree holds the chain; where it accepts less, the drafter's probabilities are wrong."""
    drafts = max(run.numbers("accuracy/slot_{slot}"), default=0)
    findings = []
    for nodes in run.numbers("tree/tau_{nodes}"):
        name = f"tree/tau_{nodes}"
        measured = np.flatnonzero(np.isfinite(run.series(name)))
        measured = measured[measured >= last_part(run).start]
        tree, chain = run.pooled(name, measured), run.pooled("tau", measured)
        # Trees are measured now and then: a line of several steps has a chain of other blocks too.
        margin = 1.0 if run.line == "step" else 0.95
        # A tree of fewer nodes than a block has drafts may end before the chain does.
        if nodes >= drafts and tree < margin * chain:
            text = f"The draft tree of {nodes} nodes accepts less (τ {tree:.2f}) than the chain (τ {chain:.2f})."
            findings.append(Finding(f"tree-{nodes}", "warning", text, "calibrate the drafter: its temperature is off"))
    return findings


def forwards_differ(run: History) -> list[Finding]:
    """τ of the training forward on the very blocks that were decoded: the promise that training serves."""
    return [
        Finding(
            "training-against-decoding",
            "warning",
            f"On the blocks of the prompts decoded at step {entry['step']}, the training forward counts τ "
            f"{entry['training_tau']:.3f} and decoding {entry['loop_tau']:.3f}: more than {percent(AGREEMENT)} apart.",
            f"training and inference forwards differ, so what training reports is not served: run `paceline check "
            f"{run.run_dir}`",
        )
        for entry in run.evaluations[-1:]
        if entry.get("training_agrees") is False
    ]


MIN_GAP = 0.8
"""Held-out τ, as a share of training τ, below which the two are said to differ."""


def held_out_below_training(run: History) -> list[Finding]:
    """Held-out τ far below training τ: memorizing, where training rises and held-out does not; else other data."""
    return _memorizing(run) or _decoded_below(run)


def _memorizing(run: History) -> list[Finding]:
    """Held-out τ of the last third of its measurements against the third before, and training τ at the same steps."""
    points = [point for point in run.held_out_tau() if point[0] > 0]
    third = len(points) // 3
    if not third:
        return []
    (early, late) = (points[-2 * third : -third], points[-third:])
    (held_before, before), (held_now, now) = (
        (float(np.mean([tau for _, tau in part])), _training_near(run, [step for step, _ in part]))
        for part in (early, late)
    )
    if not (now > 1.05 * before and held_now <= 1.01 * held_before and held_now < MIN_GAP * now):
        return []
    best = max(points, key=lambda point: point[1])
    moved = "stays" if held_now > 0.99 * held_before else "falls"
    text = (
        f"The drafter memorizes its training rows: from step {early[0][0]} to {late[-1][0]} training τ rises from "
        f"{before:.2f} to {now:.2f}, held-out τ {moved} ({held_before:.2f}, {held_now:.2f})."
    )
    advice = f"use more rows or fewer epochs (train.epochs); held-out τ was best at step {best[0]}: {best[1]:.2f}"
    return [Finding("memorizing", "warning", text, advice)]


def _training_near(run: History, steps: list[int]) -> float:
    """Training τ around some steps: of a twentieth of the run's lines before each, five at least."""
    width = max(run.steps.size // 20, 5)
    ends = np.searchsorted(run.steps, steps, side="right")
    near = np.unique(np.concatenate([np.arange(max(end - width, 0), end) for end in ends]))
    return run.pooled("tau", near) if near.size else float("nan")


def _decoded_below(run: History) -> list[Finding]:
    """Decoding that gets far less than training reports, in the newest evaluation."""
    for entry in run.evaluations[-1:]:
        decoded, step = entry.get("tau_micro"), entry["step"]
        training = _training_near(run, [step])
        if decoded is None or not decoded < MIN_GAP * training:
            continue
        text = f"Held-out prompts decode with τ {decoded:.2f} where training reports {training:.2f} at step {step}."
        epochs = int(run.epochs[-1]) + 1
        if not entry.get("training_agrees"):
            advice = (
                "compare the prompts and the template with the training rows; `paceline evaluate` compares forwards"
            )
        elif epochs > 1:
            advice = (
                f"the forward passes agree, so the drafter memorizes rows that it saw {epochs} times, or held-out "
                "prompts are not like them: use more rows or fewer epochs, and set evaluate.device to see τ over time"
            )
        else:
            advice = "the forward passes agree, so held-out prompts are not like the training rows: compare the data"
        return [Finding("decoded-below-training", "warning", text, advice)]
    return []
