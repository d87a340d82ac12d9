"""Checks of what a step saw: lengths, tags, coverage, padding. Each is a function from a history to findings."""

from __future__ import annotations

import numpy as np

from paceline.observe.diagnosis.finding import Finding, setting
from paceline.observe.diagnosis.loss_variance import LENGTH, explain_jitter
from paceline.observe.run_files import number
from paceline.observe.run_history import History
from paceline.text import percent, signed


def loss_jitter(run: History) -> list[Finding]:
    """Whether the make-up of the window moves the loss."""
    found = explain_jitter(run)
    if found is None or not found.notable:
        return []
    strategy, schedule = setting(run, "plan", "strategy"), setting(run, "plan", "schedule")
    by_length = not found.leader.startswith("tag ")
    kinds = "lengths" if by_length else "tags"
    loss, line = ("step loss", "step") if run.line == "step" else (f"loss of a {run.line}", "line")
    if not by_length:
        advice = "raise plan.accumulate, so that a window spans more kinds of samples"
    elif schedule == "curriculum":
        advice = "plan.schedule: curriculum moves the lengths by intent; stratified would not"
    elif schedule == "stratified" or strategy in MIXED or run.pooled("window/micro_batches") < 1.01:
        advice = "raise plan.accumulate, so that a window spans more lengths"
    else:
        advice = "plan.schedule: stratified would remove most of it"
    if found.leader == LENGTH:
        how = f": the loss moves by {signed(found.slope, 2)} nat as their mean doubles"
    else:
        how = (
            f", chiefly the share of {found.leader} (alone {percent(found.leader_share)}; from none to all of it the "
            f"loss moves by {signed(found.slope, 2)} nat)"
        )
    return [
        Finding(
            "loss-jitter",
            "warning",
            f"{percent(found.explained)} of the variance of the {loss} comes from which {kinds} a {line} holds{how}. "
            f"The loss scatters by ±{percent(found.relative)} around its trend.",
            advice,
        )
    ]


MIXED = ("shuffled", "packed", "mixed")
"""Strategies whose batches hold several buckets; theirs is that of the longest sample and says nothing of a step."""
MAX_SCATTER = 0.7
"""Deviation of the log2 of the steps' mean lengths, a factor of 1.6, from which on steps hold other lengths each."""


def one_sided_steps(run: History) -> list[Finding]:
    """Steps that saw one bucket only, or chiefly, or lengths of their own; by step, however many steps a line has."""
    return _of_one_bucket(run) or _of_other_lengths(run)


def _unmixed(run: History, text: str) -> Finding:
    """Steps that hold lengths of their own: an error, unless the schedule was chosen for just that."""
    if setting(run, "plan", "schedule") == "curriculum":
        return Finding("one-sided-steps", "info", text, "plan.schedule: curriculum asks for it; stratified would not")
    return Finding("one-sided-steps", "warning", text, "use plan.schedule: stratified, or raise plan.accumulate")


def _of_other_lengths(run: History) -> list[Finding]:
    """Steps whose samples are far longer, or shorter, than those of others: no matter where the buckets' edges lie."""
    middle, square = run.pooled("window/log2_length"), run.pooled("window/log2_length_squared")
    scatter = float(np.sqrt(max(square - middle**2, 0.0)))
    if not scatter >= MAX_SCATTER:
        return []
    text = (
        f"The mean length of a step's samples changes by a factor of {2**scatter:.1f} from step to step "
        f"(it is {2**middle:.0f} tokens on the whole): steps do not hold the same lengths."
    )
    return [_unmixed(run, text)]


def _of_one_bucket(run: History) -> list[Finding]:
    buckets = run.numbers("steps_with/bucket_{bucket}")
    strategy = setting(run, "plan", "strategy")
    if len(buckets) < 2 or strategy in MIXED:
        return []
    batches = {bucket: _total(run, f"micro_batches/bucket_{bucket}") for bucket in buckets}
    mostly = {bucket: _total(run, f"steps_mostly/bucket_{bucket}") for bucket in buckets}
    steps, whole = float(run.spans.sum()), sum(batches.values())
    if not whole:
        return []
    of_data = {bucket: count / whole for bucket, count in batches.items()}
    alone, size = run.pooled("window/one_bucket"), run.pooled("window/micro_batches")
    # A bucket that is nearly all of the data is alone in many steps, however they are composed.
    by_need = max(1.0 - size * (1.0 - max(of_data.values())), 0.0)
    # A bucket that is half of the data may well be most of a step.
    lopsided = sum(mostly[bucket] for bucket in buckets if of_data[bucket] < 0.5) / steps
    most = max(buckets, key=lambda bucket: mostly[bucket] * (of_data[bucket] < 0.5 or alone - by_need >= 0.1))
    held = f"A step holds {run.pooled('window/buckets'):.1f} of {len(buckets)} buckets on average."
    if size < 1.01 and strategy is not None:
        text = f"Each step is one micro-batch and so of one length bucket, though there are {len(buckets)} of them."
        return [Finding("one-sided-steps", "warning", text, "raise plan.accumulate")]
    # A tenth of the steps is far beyond the one short window at the end of an epoch.
    if alone - by_need >= 0.1:
        what = f"{percent(alone)} of the steps saw samples of one length bucket only"
    elif lopsided >= 0.25:
        what = f"{percent(lopsided)} of the steps drew at least three of four micro-batches from one length bucket"
    else:
        return []
    text = f"{what}, most often bucket {most} ({percent(of_data[most])} of all micro-batches). {held}"
    return [_unmixed(run, text)]


def _total(run: History, name: str) -> float:
    """Sum over all steps of a metric that a line averages over its steps."""
    return float(np.sum(run.counts(name) * run.spans))


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
    share, epochs = run.pooled("coverage/supervised"), number(setting(run, "train", "epochs"))
    if run.status == "finished" or epochs is None:
        epochs = int(run.epochs[-1]) + 1
    if not share * epochs < 0.5:
        return []
    text = f"Blocks cover {percent(share)} of the supervised tokens an epoch, {percent(share * epochs)} over the run."
    return [Finding("supervised-coverage", "warning", text, "raise drafter.num_anchors or train.epochs")]


def coverage(run: History) -> list[Finding]:
    """Samples of a finished epoch that were never trained."""
    share = run.series("progress/epoch_coverage")
    ends = np.flatnonzero(np.diff(run.epochs) > 0)
    # The last epoch is whole where the run came to its end and no limit of steps or hours cut it short.
    if run.status == "finished" and run.settings and setting(run, "train", "max_steps") is None:
        ends = np.append(ends, run.steps.size - 1)
    shares = share[ends][np.isfinite(share[ends])]
    if not shares.size or shares.min() >= 0.98:
        return []
    text = f"An epoch ended with {percent(float(shares.min()))} of its samples trained."
    return [Finding("coverage", "warning", text, "look at what the plan leaves out: `paceline plan`")]


def padding(run: History) -> list[Finding]:
    """More than a fifth of the target's work on padding."""
    share = run.pooled("padding_efficiency")
    if not share < 0.8:
        return []
    text = f"Only {percent(share)} of the target's tokens are real, the rest is padding."
    if setting(run, "plan", "strategy") == "grid":
        advice = "lower plan.width_multiple; small data or a small plan.token_budget leave the grid little choice"
    else:
        advice = "plan.strategy: grid wastes least"
    return [Finding("padding", "warning", text, advice)]
