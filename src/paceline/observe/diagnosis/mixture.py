"""Checks of what the steps hold: lengths, tags, coverage, padding, and whether that makes the loss jump.

Why the loss jumps from step to step is asked by a regression of the step loss on what the step's window held. Both
sides are first compared with the mean of their two neighbors, which removes whatever is straight over three steps, so
that learning itself explains nothing. The coefficients are those of the levels: the comparison is linear.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.observe.diagnosis import Finding
from paceline.observe.run_history import History
from paceline.text import percent, signed

MIN_JITTER_LINES = 40
"""Fewer lines than this say nothing about jitter."""
FIRST_SHARE, FIRST_STEPS = 0.1, 500
"""Share of the planned steps, at the start of a run, that is left out; of a long run, so many steps at most."""
LENGTH = "mean length"
MIN_SHARE = 0.3
"""Share of the variance that must be explained before anything is named."""
MIN_JITTER = 0.03
"""Explained standard deviation, as a share of the loss, below which jitter is not worth a sentence."""
BY_CHANCE = 0.5
"""Where windows are nearer to windows drawn at random than to the best of this size, the plan is to blame. On simulated
runs with 2, 4 and 8 micro-batches a step, stratified plans are at −0.2 to 0.3, shuffled ones at 0.7 to 1.7."""
NUM_WINDOWS = 2000
"""Windows that are drawn to say what variance is usual: known within 3 %."""
MIXED = ("shuffled", "packed", "mixed")
"""Strategies whose batches hold several buckets; theirs is that of the longest sample and says nothing of a step."""
MAX_SCATTER = 0.7
"""Deviation of the log2 of the steps' mean lengths, a factor of 1.6, from which on steps hold different lengths."""


@dataclass(frozen=True)
class Jitter:
    """What explains the jumps of the step loss.

    Attributes:
        deviation: standard deviation of the step loss around its trend, nat.
        relative: the same as a share of the mean loss.
        explained: share of its variance explained by the window's make-up, adjusted for the number of regressors.
        leader: regressor that alone explains most, such as ``bucket 5`` or ``tag code``; ``mean length`` where that
            explains more than all shares together; empty where nothing varies.
        leader_share: share of the variance that it explains alone.
        slope: change of the loss in nat from none of the leader to nothing but the leader; of the mean length, as it
            doubles.
        by_chance: 0 where the explained variance is what windows of this size must have, 1 where it is that of windows
            drawn at random.
    """

    deviation: float
    relative: float
    explained: float = 0.0
    leader: str = ""
    leader_share: float = 0.0
    slope: float = 0.0
    by_chance: float = 0.0

    @property
    def notable(self) -> bool:
        """Whether the window's make-up moves the loss enough to say so."""
        return self.explained >= MIN_SHARE and self.relative * np.sqrt(self.explained) >= MIN_JITTER


def explain_jitter(run: History) -> Jitter | None:
    """Regress the step loss on the buckets' and tags' shares of the window's weight, and on the mean length.

    Returns:
        None where too few lines have a loss.
    """
    # A new drafter's first steps fall too steeply to say anything about what a step holds.
    good = np.isfinite(run.series("loss")) & (run.steps > min(FIRST_SHARE * run.total_steps, FIRST_STEPS))
    if good.sum() < MIN_JITTER_LINES:
        return None
    loss = run.series("loss")[good]
    target = _against_neighbors(loss)
    columns = {name: _against_neighbors(column) for name, column in _regressors(run, good).items()}
    columns = {name: column for name, column in columns.items() if np.std(column) > 1e-9}
    deviation = float(np.std(target) / np.sqrt(1.5))  # white noise becomes noise of 1 + 1/4 + 1/4 times its variance
    relative = deviation / abs(float(np.mean(loss))) if np.mean(loss) else 0.0
    if not columns or deviation == 0:
        return Jitter(deviation, relative)
    shares = [name for name in columns if name != LENGTH]
    # The shares of all buckets sum to one (tags' may), so one of them says nothing new; least squares copes with that.
    explained = _adjusted(np.column_stack([columns[name] for name in shares]), target) if shares else 0.0
    # Few wide buckets do not tell lengths apart, and of many narrow ones a short run tells nothing; the length does.
    by_length = _adjusted(columns[LENGTH][:, None], target) if LENGTH in columns else 0.0
    alone = {name: _r_squared(column[:, None], target) for name, column in columns.items()}
    by_shares = bool(shares) and (explained >= by_length or LENGTH not in columns)
    leader = max(shares, key=lambda name: alone[name]) if by_shares else LENGTH
    explained, column = max(explained, by_length, 0.0), columns[leader]
    slope = float(column @ target / (column @ column))
    found, (least, random) = explained * deviation**2, variance_of_windows(run, good, leader, slope)
    if random > 1.01 * least:
        by_chance = (found - least) / (random - least)
    else:
        by_chance = BY_CHANCE if found > 2 * random else 0.0
    return Jitter(deviation, relative, explained, leader, alone[leader], slope, by_chance)


def _regressors(run: History, good: np.ndarray) -> dict[str, np.ndarray]:
    """By name, what may explain the loss of the good lines."""
    found = {
        f"bucket {bucket}": run.counts(f"weight_share/bucket_{bucket}")[good]
        for bucket in run.numbers("weight_share/bucket_{bucket}")
    }
    tags = {f"tag {tag}": run.counts(f"weight_share/tag_{tag}")[good] for tag in run.tags}
    # Where tags are many for the number of steps, those whose shares vary most are asked.
    ranked = sorted(tags, key=lambda name: float(np.var(tags[name])), reverse=True)
    found |= {name: tags[name] for name in ranked[: int(good.sum()) // 10]}
    length = run.series("window/mean_length")[good]
    if np.isfinite(length).all() and (length > 0).all():
        found[LENGTH] = np.log2(length)
    return found


def variance_of_windows(run: History, good: np.ndarray, leader: str, slope: float) -> tuple[float, float]:
    """Variance of the step loss, nat², in the best windows of this run's size, and in windows drawn at random.

    Lengths: m micro-batches a window, each of one bucket, with the bucket's mean loss and mean weight. The best that a
    plan can do is to take one micro-batch from each of m equal parts of all micro-batches in order of length. Both
    kinds of windows are drawn, always the same ones. Tags: the samples of a window as if drawn at random; a plan does
    not choose them by tag.
    """
    steps = float(run.spans[good].mean())
    if leader.startswith("tag "):
        share = run.pooled(f"weight_share/tag_{leader.removeprefix('tag ')}", good)
        variance = slope**2 * share * (1.0 - share) / (run.pooled("window/samples", good) * steps)
        return variance, variance
    buckets = run.numbers("loss/bucket_{bucket}")
    names = ("micro_batches", "samples", "real_tokens")
    batches, samples, tokens = (
        np.array([np.sum((run.counts(f"{name}/bucket_{bucket}") * run.spans)[good]) for bucket in buckets])
        for name in names
    )
    weight = np.array([np.nansum(run.weights[f"loss/bucket_{bucket}"][good]) for bucket in buckets])
    loss = np.array([run.pooled(f"loss/bucket_{bucket}", good) for bucket in buckets])
    if leader == LENGTH:  # many narrow buckets: the loss of each is noise, the effect of the length is not
        loss = slope * np.log2(np.maximum(tokens, 1) / np.maximum(samples, 1))
    seen = (batches > 0) & (weight > 0) & np.isfinite(loss)
    if seen.sum() < 2:
        return 0.0, 0.0
    batches, weight, loss = batches[seen], weight[seen] / batches[seen], loss[seen]
    parts = max(round(run.pooled("window/micro_batches", good) * steps), 1)
    at = np.random.default_rng(0).uniform(size=(NUM_WINDOWS, parts))
    ends = np.cumsum(batches) / batches.sum()
    best, chance = (
        np.minimum(np.searchsorted(ends, places, side="right"), ends.size - 1)
        for places in ((at + np.arange(parts)) / parts, at)
    )
    least, random = (
        float(np.var((weight[drawn] * loss[drawn]).sum(axis=1) / weight[drawn].sum(axis=1))) for drawn in (best, chance)
    )
    return least, random


def _against_neighbors(values: np.ndarray) -> np.ndarray:
    """Each value minus the mean of the one before and the one after, [n - 2]."""
    return values[1:-1] - (values[:-2] + values[2:]) / 2


def _r_squared(columns: np.ndarray, target: np.ndarray) -> float:
    centered = columns - columns.mean(axis=0)
    goal = target - target.mean()
    solution, *_ = np.linalg.lstsq(centered, goal, rcond=1e-9)
    return 1.0 - float(np.sum((goal - centered @ solution) ** 2) / np.sum(goal**2))


def _adjusted(columns: np.ndarray, target: np.ndarray) -> float:
    rank = int(np.linalg.matrix_rank(columns - columns.mean(axis=0), tol=1e-9))
    free = target.size - rank - 1
    return 1.0 - (1.0 - _r_squared(columns, target)) * (target.size - 1) / free if free > 0 else 0.0


def loss_jitter(run: History) -> list[Finding]:
    """Whether the make-up of the window moves the loss, and more than it must in windows of this size."""
    found = explain_jitter(run)
    if found is None or not found.notable:
        return []
    schedule = run.setting("plan", "schedule")
    kinds = "tags" if found.leader.startswith("tag ") else "lengths"
    loss, line = ("step loss", "step") if run.line == "step" else (f"loss of a {run.line}", "line")
    if kinds == "tags":
        advice = "raise plan.accumulate, so that a window spans more kinds of samples"
    elif schedule == "curriculum":
        advice = "plan.schedule: curriculum moves the lengths by intent; stratified would not"
    elif schedule == "stratified" or run.setting("plan", "strategy") in MIXED or found.by_chance < BY_CHANCE:
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
    text = (
        f"{percent(found.explained)} of the variance of the {loss} comes from which {kinds} a {line} holds{how}. "
        f"The loss scatters by ±{percent(found.relative)} around its trend."
    )
    # Stratified windows are the best that a plan can do; one that fails to be is found by `one_sided_steps`.
    if found.by_chance >= BY_CHANCE and (schedule != "stratified" or kinds == "tags"):
        return [Finding("loss-jitter", "warning", text, advice)]
    size = f"{run.pooled('window/micro_batches'):.1f} micro-batches"
    return [Finding("loss-jitter", "info", f"{text} A window of {size} cannot do much better.", advice)]


def one_sided_steps(run: History) -> list[Finding]:
    """Steps that saw one bucket only, or mostly, or lengths that no other step saw; by step, not by line."""
    return _of_one_bucket(run) or _of_other_lengths(run)


def _unmixed(run: History, text: str) -> Finding:
    """Steps that do not hold the same lengths: an error, unless the schedule was chosen for just that."""
    if run.setting("plan", "schedule") == "curriculum":
        return Finding("one-sided-steps", "info", text, "plan.schedule: curriculum asks for it; stratified would not")
    return Finding("one-sided-steps", "warning", text, "use plan.schedule: stratified, or raise plan.accumulate")


def _of_other_lengths(run: History) -> list[Finding]:
    """Steps whose samples are far longer, or shorter, than those of others, wherever the buckets' edges are."""
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
    strategy = run.setting("plan", "strategy")
    counts = {b: _total(run, f"micro_batches/bucket_{b}") for b in run.numbers("micro_batches/bucket_{bucket}")}
    batches = {bucket: count for bucket, count in counts.items() if count}
    if len(batches) < 2 or strategy in MIXED:
        return []
    mostly = {bucket: _total(run, f"steps_mostly/bucket_{bucket}") for bucket in batches}
    steps, whole = float(run.spans.sum()), sum(batches.values())
    of_data = {bucket: count / whole for bucket, count in batches.items()}
    alone, size = run.pooled("window/one_bucket"), run.pooled("window/micro_batches")
    # A bucket that is nearly all of the data is alone in many steps, however they are composed.
    by_need = max(1.0 - size * (1.0 - max(of_data.values())), 0.0)
    # A bucket that is half of the data may well be most of a step.
    lopsided = sum(mostly[bucket] for bucket in batches if of_data[bucket] < 0.5) / steps
    most = max(batches, key=lambda bucket: mostly[bucket] * (of_data[bucket] < 0.5 or alone - by_need >= 0.1))
    held = f"A step holds {run.pooled('window/buckets'):.1f} of {len(batches)} buckets on average."
    if size < 1.01 and strategy is not None:
        text = f"Each step is one micro-batch and so of one length bucket, though there are {len(batches)} of them."
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
    """Tags whose samples are many and whose part of the loss is next to nothing."""
    whole, samples = run.weights.get("loss"), _total(run, "window/samples")
    if whole is None or not samples:
        return []
    starved = []
    for tag in run.tags:
        weight = run.weights.get(f"loss/tag_{tag}")
        share = _total(run, f"samples/tag_{tag}") / samples
        of_weight = float(np.nansum(weight) / np.nansum(whole)) if weight is not None else 1.0
        # Short answers weigh less by nature; a fifth of a sample's part is more than that.
        if share >= 0.02 and of_weight < 0.2 * share:
            starved.append(f"{tag} ({percent(share)} of the samples, {percent(of_weight)} of the loss weight)")
    if not starved:
        return []
    text = f"Starved tags: {'; '.join(starved[:5])}."
    advice = "objective.weighting: sample lets every sample count the same, plan.weights shows some more often"
    return [Finding("starved-tags", "warning", text, advice)]


def supervised_coverage(run: History) -> list[Finding]:
    """Answers of which blocks cover only a part, over all epochs together."""
    share, epochs = run.pooled("coverage/supervised"), run.setting("train", "epochs")
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
    if run.status == "finished" and run.settings and run.setting("train", "max_steps") is None:
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
    if run.setting("plan", "strategy") == "grid":
        advice = "lower plan.width_multiple; small data or a small plan.token_budget leave the grid little choice"
    else:
        advice = "plan.strategy: grid wastes least"
    return [Finding("padding", "warning", text, advice)]
