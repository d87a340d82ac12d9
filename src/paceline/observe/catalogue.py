"""Every metric that a run may log: name, unit, meaning, population, and how it reduces. Nothing else can be logged.

A name is literal (``loss``) or a family with one placeholder a braced word (``loss/bucket_{bucket}``). The part before
the slash groups metrics on dashboards; names without a slash are the headline ones.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from paceline.errors import MetricError

Reduction = Literal["ratio", "per_step", "max", "last"]

REDUCTION_TEXT: dict[Reduction, str] = {
    "ratio": "numerators and denominators are added over micro-batches, ranks and steps, and divided once",
    "per_step": "added over micro-batches and ranks, averaged over the steps of a line",
    "max": "largest over micro-batches, ranks and the steps of a line",
    "last": "value when the line was written, the same on every rank",
}

_PLACEHOLDERS = {
    **dict.fromkeys(("bucket", "slot", "k", "nodes", "tap"), r"[0-9]{1,6}"),
    **dict.fromkeys(("stage", "device", "queue", "tag", "term", "worker"), r"[A-Za-z0-9_.:-]{1,200}"),
    "state": r"[a-z_]+",
    "metric": r"[a-z0-9_]+(?:/[a-z0-9_]+)?",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or one family of metrics.

    Attributes:
        name: literal or with placeholders.
        unit: of the value; ``1`` for plain numbers and shares.
        meaning: what it says, as a sentence fragment.
        population: what it is counted over.
        reduction: how values combine.
        better: ``lower``, ``higher`` or ``""`` where neither is better by itself.
    """

    name: str
    unit: str
    meaning: str
    population: str
    reduction: Reduction
    better: Literal["", "lower", "higher"] = ""


_STEPS = "optimizer steps"
_BATCHES = "micro-batches, by step"
_HELD_OUT = "held-out validation batches"
_STEPS = "optimizer steps"
_BATCHES = "micro-batches, by step"
_HELD_OUT = "held-out validation batches"
_STEPS = "optimizer steps"
_BATCHES = "micro-batches, by step"
_HELD_OUT = "held-out validation batches"
_SLOTS = "supervised draft slots of the window"
_BLOCKS = "blocks (anchors) of the window"
_BUCKET = "micro-batches of that bucket in the window; 0 where there are none"
_DECODED = "held-out prompts, decoded with a checkpoint"
_WORKER = "one worker process; one that did nothing has 0"
_WINDOW = "the window: all micro-batches of one optimizer step"

CATALOGUE: tuple[Metric, ...] = (
    # Headline.
    Metric("loss", "nat", "Σ weighted loss / Σ weight, divided once for the whole window", _WINDOW, "ratio", "lower"),
    Metric("tau", "token", "acceptance length: 1 + mean streak; tokens per target pass", _BLOCKS, "ratio", "higher"),
    Metric("learning_rate", "1", "learning rate of the step", _WINDOW, "last"),
    Metric("real_tokens_per_s", "token/s", "real tokens through the target a second", _WINDOW, "ratio", "higher"),
    Metric("draft_positions_per_s", "position/s", "anchors × block size trained a second", _WINDOW, "ratio", "higher"),
    Metric("padding_efficiency", "1", "real tokens / padded tokens", _WINDOW, "ratio", "higher"),
    # Objective.
    Metric("objective/{term}", "nat", "one term of the objective, unweighted unless its name says so", _SLOTS, "ratio"),
    Metric("schedule/gamma", "slot", "decay length of the slot weights", _WINDOW, "last"),
    Metric("schedule/noise_ratio", "1", "share of noised inputs", _WINDOW, "last"),
    Metric("noise/snr_tap_{tap}", "1", "feature energy / noise energy of one tap", _WINDOW, "ratio"),
    # Acceptance.
    Metric("acceptance/streak", "token", "accepted drafts of a block, bonus excluded", _BLOCKS, "ratio", "higher"),
    Metric("acceptance/slot_{slot}", "1", "slot accepted, where all earlier ones were", _BLOCKS, "ratio", "higher"),
    Metric("accuracy/all", "1", "slot's top-1 draft is the label, over all slots", _SLOTS, "ratio", "higher"),
    Metric("accuracy/slot_{slot}", "1", "top-1 draft is the label, whatever came before", _SLOTS, "ratio", "higher"),
    Metric("coverage/top_{k}_slot_{slot}", "1", "label is among the k likeliest tokens", _SLOTS, "ratio", "higher"),
    Metric("tree/streak_{nodes}", "token", "accepted depth of a DDTree of so many nodes", _BLOCKS, "ratio", "higher"),
    Metric("tree/surrogate_{nodes}", "token", "depth that the drafter itself expects of that tree", _BLOCKS, "ratio"),
    Metric("tree/surrogate_ratio_{nodes}", "1", "realised / expected depth of that tree", _BLOCKS, "ratio"),
    Metric("tree/tau_{nodes}", "token", "1 + mean tree streak", _BLOCKS, "ratio", "higher"),
    Metric("tree/temperature", "1", "of the logits, at which surrogate and streak of a tree agree", _BLOCKS, "last"),
    # Validation.
    Metric("validation/{metric}", "1", "that metric on held-out samples, always the same", _HELD_OUT, "ratio"),
    # Real decoding of a checkpoint by the evaluator.
    Metric("decode/tau", "token", "tokens per target pass", _DECODED, "last", "higher"),
    Metric("decode/tau_macro", "token", "mean over prompts of their own τ", _DECODED, "last", "higher"),
    Metric("decode/training_tau", "token", "τ of the training forward on the decoded blocks", _DECODED, "last"),
    Metric("decode/control_tau", "token", "τ without features, near 1", "the first decoded prompts", "last"),
    Metric("decode/slot_{slot}", "1", "draft accepted, given that all earlier ones are", _DECODED, "last", "higher"),
    Metric("decode/step", "step", "optimizer steps of the checkpoint that was decoded", "the run", "last"),
    Metric("decode/seconds", "s", "wall time of the measurement", _DECODED, "last", "lower"),
    # Optimizer.
    Metric("gradient/norm", "1", "gradient norm before clipping", "steps that were not skipped", "ratio"),
    Metric("gradient/norm_max", "1", "largest gradient norm before clipping", "steps that were not skipped", "max"),
    Metric("gradient/clipped", "1", "share of steps whose gradient was scaled down", _STEPS, "ratio"),
    Metric("gradient/skipped", "1", "share of steps skipped for a gradient that is not finite", _STEPS, "ratio"),
    Metric("norms/unmoved", "1", "share of norm weights still at their first value", "norm weights", "last", "lower"),
    # What the window held.
    Metric("window/samples", "sample", "samples, the batch size of the step", _WINDOW, "per_step"),
    Metric("window/micro_batches", "micro-batch", "micro-batches", _WINDOW, "per_step"),
    Metric("window/anchors", "anchor", "anchors, one block each", _WINDOW, "per_step"),
    Metric("window/real_tokens", "token", "real context tokens", _WINDOW, "per_step"),
    Metric("window/padded_tokens", "token", "context tokens with padding", _WINDOW, "per_step"),
    Metric("window/draft_positions", "position", "anchors × block size", _WINDOW, "per_step"),
    Metric("window/buckets", "bucket", "distinct buckets", _WINDOW, "per_step"),
    Metric("window/one_bucket", "1", "share with one bucket only", "steps of several batches", "ratio", "lower"),
    Metric("window/mean_length", "token", "real tokens a sample", _WINDOW, "ratio"),
    Metric("window/max_length", "token", "longest sample", _WINDOW, "max"),
    Metric("window/log2_length", "1", "log2 of a step's mean length in tokens", _BATCHES, "ratio"),
    Metric("window/log2_length_squared", "1", "its square, for the variance from step to step", _BATCHES, "ratio"),
    Metric("window/samples_per_micro_batch", "sample", "samples a micro-batch", _WINDOW, "ratio"),
    # By bucket (0 = shortest).
    Metric("loss/bucket_{bucket}", "nat", "loss of one bucket", _BUCKET, "ratio", "lower"),
    Metric("weight_share/bucket_{bucket}", "1", "bucket's share of the window's loss weight", _WINDOW, "ratio"),
    Metric("samples/bucket_{bucket}", "sample", "samples of one bucket", _BUCKET, "per_step"),
    Metric("micro_batches/bucket_{bucket}", "micro-batch", "micro-batches of one bucket", _BUCKET, "per_step"),
    Metric("steps_with/bucket_{bucket}", "1", "share of steps that held the bucket", _STEPS, "per_step"),
    Metric("steps_mostly/bucket_{bucket}", "1", "share of steps with 3 of 4 batches from it", _STEPS, "per_step"),
    Metric("anchors/bucket_{bucket}", "anchor", "anchors of one bucket", _BUCKET, "per_step"),
    Metric("real_tokens/bucket_{bucket}", "token", "real tokens of one bucket", _BUCKET, "per_step"),
    Metric("padded_tokens/bucket_{bucket}", "token", "padded tokens of one bucket", _BUCKET, "per_step"),
    Metric("total_samples/bucket_{bucket}", "sample", "samples of one bucket since the run began", "the run", "last"),
    Metric("total_real_tokens/bucket_{bucket}", "token", "real tokens of one bucket since then", "the run", "last"),
    # By tag of the data.
    Metric("loss/tag_{tag}", "nat", "loss of the samples with one tag", "samples with that tag", "ratio", "lower"),
    Metric("weight_share/tag_{tag}", "1", "tag's share of the window's loss weight", _WINDOW, "ratio"),
    Metric("samples/tag_{tag}", "sample", "samples with one tag", "samples with that tag", "per_step"),
    # What of the data was trained.
    Metric("coverage/supervised", "1", "draft slots, each time counted / supervised tokens", _WINDOW, "ratio"),
    # Speed and stages.
    Metric("speed/seconds_per_step", "s", "wall time of an optimizer step", _STEPS, "ratio", "lower"),
    Metric("speed/padded_tokens_per_s", "token/s", "context tokens with padding a second", _WINDOW, "ratio"),
    Metric("speed/samples_per_s", "sample/s", "samples a second", _WINDOW, "ratio", "higher"),
    Metric("speed/mfu_{stage}", "1", "model FLOPs / what devices can do", "devices of the stage", "ratio", "higher"),
    Metric("stage/{stage}/{state}", "1", "share of time busy, starved or blocked", "workers of the stage", "ratio"),
    Metric("queue/{queue}_items", "item", "items waiting in a channel", "one channel", "last"),
    Metric("queue/{queue}_bytes", "B", "bytes waiting in a channel", "one channel", "last"),
    Metric("memory/{device}_bytes", "B", "memory in use", "a device or process", "last"),
    Metric("memory_peak/{device}_bytes", "B", "most memory in use so far", "a device or process", "max"),
    # By worker process, such as target_0 or drafter_1.
    Metric("worker/{worker}/batches", "micro-batch", "micro-batches that it finished", _WORKER, "per_step"),
    Metric("worker/{worker}/real_tokens_per_s", "token/s", "real tokens that it finished a second", _WORKER, "ratio"),
    Metric("worker/{worker}/busy", "1", "share of its time that it worked", _WORKER, "ratio"),
    Metric("worker/{worker}/memory_bytes", "B", "most memory of the process so far", _WORKER, "max"),
    Metric("worker/{worker}/gpu_memory_bytes", "B", "most memory of its device so far", _WORKER, "max"),
    Metric("worker/{worker}/power_w", "W", "power of its device, where the machine reports it", _WORKER, "last"),
    Metric("worker/{worker}/temperature_c", "°C", "temperature of its device", _WORKER, "last"),
    Metric("worker/{worker}/clock_mhz", "MHz", "clock of its device", _WORKER, "last"),
    # Progress.
    Metric("progress/epoch", "epoch", "0-based epoch", "the run", "last"),
    Metric("progress/window", "window", "0-based window of the epoch", "the run", "last"),
    Metric("progress/share", "1", "steps done / steps planned", "the run", "last"),
    Metric("progress/time_left_s", "s", "time left at the recent speed", "the run", "last"),
    Metric("progress/epoch_samples", "sample", "samples trained so far in this epoch", "the epoch", "last"),
    Metric("progress/epoch_coverage", "1", "share of the epoch's samples trained so far", "the epoch", "last"),
)


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", name)
    text = "".join(re.escape(part) if i % 2 == 0 else f"({_PLACEHOLDERS[part]})" for i, part in enumerate(parts))
    return re.compile(text)


_LITERAL = {metric.name: metric for metric in CATALOGUE if "{" not in metric.name}
_FAMILIES = tuple((_pattern(metric.name), metric) for metric in CATALOGUE if "{" in metric.name)


@functools.lru_cache(maxsize=8192)
def find(name: str) -> Metric:
    """The catalogue's entry for a logged name.

    Raises:
        MetricError: the name is in no entry.
    """
    literal = _LITERAL.get(name)
    if literal is not None:
        return literal
    for pattern, metric in _FAMILIES:
        if pattern.fullmatch(name):
            return metric
    raise MetricError(f"{name}: not in the metric catalogue; add it to paceline.observe.catalogue or correct the name")


def number_of(name: str, family: str) -> int | None:
    """The number in a name of a one-number family: ``("loss/bucket_3", "loss/bucket_{bucket}")`` → 3; else None."""
    found = _compiled(family).fullmatch(name)
    return int(found.group(1)) if found else None


_compiled = functools.lru_cache(maxsize=128)(_pattern)
