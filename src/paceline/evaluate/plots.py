"""Evaluations as one picture: acceptance by slot, accepted lengths, τ by tag and by context length.

Several drafters share the picture. Lines differ in marker and dash, bars in hatching, so that it can be read without
color. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from paceline.evaluate.metrics import GroupTau
    from paceline.evaluate.report import EvaluationReport

KINDS = (".png", ".svg")
MAX_TAGS = 20
"""Tags that are drawn: those with most target passes."""
INK = "#1f2933"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Told apart by color-blind eyes too."""
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----")
MARKERS = "os^Dv*"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 1)), (0, (9, 3)))


def draw_evaluations(reports: Mapping[str, EvaluationReport], path: Path) -> None:
    """Writes the picture.

    Args:
        reports: by the drafter's name, at least one.
        path: .png or .svg.

    Raises:
        ConfigError, DataError: another kind of file; it cannot be written.
    """
    check_kind(path)
    import matplotlib
    from matplotlib.figure import Figure

    tags = _largest([report.by_tag for report in reports.values()])
    contexts = list(dict.fromkeys(name for report in reports.values() for name in report.by_context))
    lower = min(max(0.16 * len(tags) * (1 + len(reports)), 2.8), 12.0)
    with matplotlib.rc_context({"svg.hashsalt": "paceline", "svg.fonttype": "none", "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(11.0, 4.4 + lower), dpi=110, layout="constrained")
        ((slots, lengths), (by_tag, by_context)) = figure.subplots(2, 2, height_ratios=[3.4, lower])
        _draw_slots(slots, reports)
        _draw_lengths(lengths, reports)
        _draw_groups(by_tag, {name: report.by_tag for name, report in reports.items()}, tags, "τ by tag")
        of_context = {name: report.by_context for name, report in reports.items()}
        _draw_groups(by_context, of_context, contexts, "τ by context length (tokens)")
        handles, labels = lengths.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", frameon=False, fontsize=9, ncols=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error})") from error


def check_kind(path: Path) -> None:
    """Refuse a file that is no picture, or that cannot be written, before any work.

    Raises:
        ConfigError: its name or its folder says so.
    """
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"{path}: a picture is written as {' or '.join(KINDS)}; name the file so")
    try:
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        writable = not path.is_dir() and nearest.is_dir() and os.access(nearest, os.W_OK)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); give another name") from error
    if not writable:
        raise ConfigError(f"{path}: cannot be written; name a file in a folder that is there or can be made")


def _draw_slots(axis: Axes, reports: Mapping[str, EvaluationReport]) -> None:
    for number, report in enumerate(reports.values()):
        known = [(rate.slot, 100 * rate.conditional) for rate in report.slots if rate.conditional is not None]
        axis.plot(
            [slot for slot, _ in known],
            [share for _, share in known],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle=DASHES[number % len(DASHES)],
            linewidth=1.6,
            markersize=5,
        )
    axis.set_ylim(0, 103)
    _whole_numbers(axis, max(len(report.slots) for report in reports.values()), first=1)
    axis.set_xlabel("draft slot", fontsize=9)
    axis.set_ylabel("kept, given those before, %", fontsize=9)
    _tidy(axis, "Acceptance by slot", "both")


def _draw_lengths(axis: Axes, reports: Mapping[str, EvaluationReport]) -> None:
    width = 0.8 / len(reports)
    for number, (name, report) in enumerate(reports.items()):
        passes = max(sum(report.histogram), 1)
        offset = (number - (len(reports) - 1) / 2) * width
        places = [length + offset for length in range(len(report.histogram))]
        shares = [100 * count / passes for count in report.histogram]
        label = f"{name}: τ {report.tau_micro:.2f} over {report.passes:,} target passes, {report.num_prompts} prompts"
        axis.bar(places, shares, width, label=label, **_look(number))
    _whole_numbers(axis, max(len(report.histogram) for report in reports.values()) - 1, first=0)
    axis.set_xlabel("drafts that stand", fontsize=9)
    axis.set_ylabel("target passes, %", fontsize=9)
    _tidy(axis, "Accepted lengths", "y")


def _draw_groups(axis: Axes, groups: Mapping[str, Mapping[str, GroupTau]], names: Sequence[str], title: str) -> None:
    """Horizontal bars, one a group and drafter, with τ written at their ends; first group on top."""
    width = 0.8 / len(groups)
    for number, found in enumerate(groups.values()):
        offset = (number - (len(groups) - 1) / 2) * width
        known = [(place, found[name]) for place, name in enumerate(names) if name in found and found[name].passes]
        bars = axis.barh(
            [place + offset for place, _ in known], [group.tau for _, group in known], width, **_look(number)
        )
        axis.bar_label(bars, [f"{group.tau:.2f}" for _, group in known], padding=2, fontsize=7, color=INK)
    axis.set_yticks(range(len(names)), list(names))
    axis.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axis.margins(x=0.12)
    axis.set_xlim(left=0)
    axis.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
    axis.set_xlabel("tokens per target pass (dotted: no draft kept)", fontsize=9)
    if not names:
        axis.text(0.5, 0.5, "nothing to tell apart", transform=axis.transAxes, ha="center", color=INK)
    _tidy(axis, title, "x")


def _largest(groups: Sequence[Mapping[str, GroupTau]]) -> list[str]:
    """Tags with most passes over all drafters, in alphabetical order."""
    passes: dict[str, int] = {}
    for found in groups:
        for name, group in found.items():
            passes[name] = passes.get(name, 0) + group.passes
    return sorted(sorted(passes, key=lambda name: (-passes[name], name))[:MAX_TAGS])


def _look(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "hatch": HATCHES[number % len(HATCHES)],
        "edgecolor": INK,
        "linewidth": 0.5,
    }


def _whole_numbers(axis: Axes, last: int, *, first: int) -> None:
    step = max((last - first) // 16 + 1, 1)
    axis.set_xticks(range(first, last + 1, step))


def _tidy(axis: Axes, title: str, grid: str) -> None:
    axis.set_title(title, fontsize=10, loc="left", color=INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(labelsize=8)
    if grid in ("x", "both"):
        axis.xaxis.grid(True, alpha=0.3, linewidth=0.6)
    if grid in ("y", "both"):
        axis.yaxis.grid(True, alpha=0.3, linewidth=0.6)
    axis.set_axisbelow(True)
