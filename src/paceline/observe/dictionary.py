"""docs/metrics.md from the catalogue: ``python -m paceline.observe.dictionary > docs/metrics.md``."""

from __future__ import annotations

import sys

from paceline.observe.catalogue import CATALOGUE, REDUCTION_TEXT, Metric

_INTRODUCTION = """# Metrics

Generated from `paceline.observe.catalogue`; do not edit. To renew it:
`python -m paceline.observe.dictionary > docs/metrics.md`.

A name that is not here cannot be logged; a run logs those of them that its settings and its machine have something to
say about. They are the names in `metrics.jsonl` (under `values`), in W&B, TensorBoard and trackio. The part before the
slash groups them on dashboards. A word in braces stands for a number or a name: `loss/bucket_{bucket}` is
`loss/bucket_0`, `loss/bucket_1`, and so on; bucket 0 holds the shortest samples.

How one value comes from many micro-batches, ranks and optimizer steps:

"""


_READING = """## How to read them

- **Shares of a step.** A line may cover several optimizer steps (`observe.every_steps`); a line ends with its epoch and
  at a checkpoint. `window/one_bucket`, `steps_with/bucket_{bucket}` and `steps_mostly/bucket_{bucket}` are counted step
  by step before the line is written, so that a mixture that is level over a line cannot hide steps that are not.
- **Stage shares.** `busy`, `starved` and `blocked` share out a stage's time while it has something to wait for. A stage
  that is done is not told apart from one that waits: target workers that have made their last batch count as `starved`
  while a buffer is free and as `blocked` while none is, and a feed that has made its last batch counts as nothing, so
  that its shares sum to less than one. Judge a stage by the middle of a run, not by its last steps.
- **After a kill.** A run that was killed between a checkpoint and its line goes on without the metrics of those steps;
  a note says which. `progress/epoch_samples` and `progress/epoch_coverage` are then left out up to the next epoch.
- **Samples carried over.** With `plan.leftover: carry` every epoch has a size of its own, and
  `progress/epoch_coverage` is not logged.
- **`dropped_lines`** in the `closed` event counts what a mirror's queue lost, and what came after the mirror failed. It
  can undercount: lines that a mirror had taken but not delivered when it was left behind or its process died, and lines
  that still waited when it did not finish in time, are not in it. `metrics.jsonl` has them all.
"""


def dictionary() -> str:
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
    sys.stdout.write(dictionary())
