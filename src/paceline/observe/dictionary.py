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
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(dictionary())
