"""Writes docs/metrics.md from the metric catalogue: ``python scripts/metrics_doc.py > docs/metrics.md``."""

from __future__ import annotations

import sys

from paceline.observe.catalogue import CATALOGUE, REDUCTION_TEXT, Metric

_INTRODUCTION = """# Metrics

Generated from `paceline.observe.catalogue`; do not edit. To renew it:
`python scripts/metrics_doc.py > docs/metrics.md`.

Only these names can be logged; a run logs those for which its settings and its machine have values. They are the names
in `metrics.jsonl` (under `values`), in W&B, TensorBoard and trackio. The part before the slash groups them on
dashboards. A word in braces is a number or a name: `loss/bucket_{bucket}` is `loss/bucket_0`, `loss/bucket_1`, and so
on; bucket 0 holds the shortest samples.

How one value comes from many micro-batches, ranks and optimizer steps:

"""


_READING = """## How to read them

- **Zeros.** A bucket, tag or worker that got nothing in a line has 0 there, so that starvation shows in every tracker.
  `total_samples/bucket_{bucket}` and `total_real_tokens/bucket_{bucket}` count since the run began.
- **Shares of a step.** A line may cover several optimizer steps (`observe.every_steps`); a line ends with its epoch and
  at a checkpoint. `window/one_bucket`, `steps_with/bucket_{bucket}` and `steps_mostly/bucket_{bucket}` are counted step
  by step before the line is written, so a mixture that is level over a line cannot hide steps that are not.
- **Stage shares.** `busy`, `starved` and `blocked` share out the time of a stage. A stage that has finished looks like
  one that waits: target workers that have made their last batch count as `starved` while a buffer is free and as
  `blocked` while none is; a feed that has made its last batch counts as nothing, so its shares sum to less than one.
  Judge a stage by the middle of a run, not by its last steps.
- **Workers.** `worker/{worker}/busy` and `worker/{worker}/real_tokens_per_s` are of the whole time of a line; their
  ratio is the speed while the worker works, by which workers are compared.
  Power, temperature and clock of cards need `pip install 'paceline[nvml]'`, and a pipeline.
- **Micro-batches.** With `observe.micro_batches: true` the loss of each one is a line of `micro_batches.jsonl`, and a
  detail of its step in the trace. Their mean, weighted by `weight`, is the loss of the step.
- **After a kill.** A run that was killed between a checkpoint and its line resumes without the metrics of those steps;
  a note says which. `progress/epoch_samples` and `progress/epoch_coverage` are then left out until the next epoch, and
  the counts since the run began lack those steps.
- **Samples carried over.** With `plan.leftover: carry` epochs differ in size, and `progress/epoch_coverage` is not
  logged.
- **`dropped_lines`** in the `closed` event counts lines that a tracker did not get: those its queue dropped, and those
  after it failed. It can be too low by the lines that a tracker had taken and not yet delivered when it failed or did
  not finish in time. `metrics.jsonl` has them all.
"""


def document() -> str:
    """The document."""
    lines = [_INTRODUCTION.rstrip("\n"), ""]
    lines += [f"- **{name}**: {text}." for name, text in REDUCTION_TEXT.items()]
    lines += [
        "",
        "For a ratio, `weights` in `metrics.jsonl` holds the denominator, so that lines can be put together exactly.",
    ]
    groups: dict[str, list[Metric]] = {}
    for metric in CATALOGUE:
        group, slash, _ = metric.name.partition("/")
        groups.setdefault(group if slash else "headline", []).append(metric)
    for group, metrics in groups.items():
        lines += ["", f"## {group}", "", "| name | unit | meaning | counted over | reduces as | better |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [
            f"| `{m.name}` | {m.unit} | {m.meaning} | {m.population} | {m.reduction} | {m.better or '–'} |"
            for m in metrics
        ]
    return "\n".join([*lines, "", _READING.strip()]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
