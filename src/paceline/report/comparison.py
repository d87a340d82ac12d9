"""Two or more runs on one page: their figures side by side, their curves over one another, settings that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.diagnosis.mixture import explain_jitter
from paceline.observe.run_history import History, read_history
from paceline.report.page import (
    MAX_CELL,
    MAX_ROWS,
    Html,
    check_place,
    element,
    figure,
    fitted,
    flat,
    joined,
    save,
    table,
)
from paceline.report.plots import decoded_tau, last_tenth, tick
from paceline.report.svg import DASHES, condensed, drawing, label_ends, series_color, smoothed, to_svg
from paceline.report.values import shortened
from paceline.text import duration, percent, short

COMPARISON_FILE = "comparison.html"

_CURVES = (
    ("loss", "Loss", "nat"),
    ("tau", "Training τ", "tokens per target pass"),
    ("window/mean_length", "Mean length of the step's samples", "tokens"),
    ("gradient/norm", "Gradient norm", ""),
    ("real_tokens_per_s", "Real tokens a second", "tokens/s"),
    ("draft_positions_per_s", "Draft positions a second", "positions/s"),
)


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the comparison of two or more runs.

    Args:
        run_dirs: directories of the runs; the first is the one that the others are compared with.
        out: HTML file.

    Returns:
        The file.

    Raises:
        RunDirectoryError: one of them is no run, or the file cannot be written or is no page.
    """
    check_place(out)
    return save(render_comparison([read_history(run_dir) for run_dir in run_dirs]), out)


def render_comparison(runs: Sequence[History]) -> str:
    """The whole page."""
    names = _names(runs)
    parts = [
        ("figures", "Side by side", table(("", *names), _figures(runs))),
        ("findings", "Findings", _findings(runs, names)),
        ("curves", "Curves", _curves(runs, names)),
        ("settings", "Settings that differ", _differences([run.settings for run in runs], names)),
        ("environment", "Environment that differs", _differences([run.facts for run in runs], names)),
        ("missing", "What is missing", _missing(runs, names)),
    ]
    return fitted(shortened(" / ".join(names), 200), parts, ramp=1)


def _names(runs: Sequence[History]) -> list[str]:
    """Directory names, with a number where two are the same."""
    names = [run.name for run in runs]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _figures(runs: Sequence[History]) -> list[tuple[str, ...]]:
    jitters = [explain_jitter(run) for run in runs]
    deviations = [jitter.deviation if jitter else float("nan") for jitter in jitters]
    # A line of many steps scatters less than one of a single step, whatever was trained.
    alike = [run.line == runs[0].line and deviations[0] > 0 for run in runs]
    ratios = [(d / deviations[0]) ** 2 if same else math.nan for d, same in zip(deviations, alike, strict=True)]
    rows: list[tuple[str, ...]] = [
        ("optimizer steps", *(str(run.steps[-1]) if run.steps.size else "–" for run in runs)),
        ("status", *(run.status for run in runs)),
        ("loss, last tenth", *(_number(run.pooled("loss", last_tenth(run)), 3) for run in runs)),
        ("training τ, last tenth", *(_number(run.pooled("tau", last_tenth(run)), 2) for run in runs)),
        ("decoded τ", *(_number(decoded_tau(run)[-1][1], 2) if decoded_tau(run) else "–" for run in runs)),
        ("a line of metrics is a", *(run.line for run in runs)),
        ("scatter of the loss of a line, nat", *(_number(deviation, 4) for deviation in deviations)),
        ("its variance, first run = 1", *(_number(ratio, 3) for ratio in ratios)),
        ("of it from the lengths in a line", *(percent(jitter.explained) if jitter else "–" for jitter in jitters)),
        ("real of padded tokens", *(percent(run.pooled("padding_efficiency")) for run in runs)),
        ("real tokens/s", *(short(run.pooled("real_tokens_per_s")) for run in runs)),
        ("draft positions/s", *(short(run.pooled("draft_positions_per_s")) for run in runs)),
        ("training time", *(duration(_seconds(run)) for run in runs)),
        ("real tokens trained", *(short(float(np.sum(run.counts("window/real_tokens") * run.spans))) for run in runs)),
    ]
    return rows


def _findings(runs: Sequence[History], names: Sequence[str]) -> Html:
    rows = [
        element("li", element("b", f"{name}:"), finding.text, class_=finding.level)
        for run, name in zip(runs, names, strict=True)
        for finding in diagnose(run)
        if finding.level == "warning"
    ]
    return element("ul", *rows, class_="findings") if rows else element("p", "No warnings in any of the runs.")


def _curves(runs: Sequence[History], names: Sequence[str]) -> Html:
    drawn = [
        figure(svg, title, "Smoothed over 4 % of each run.")
        for name, title, unit in _CURVES
        if (svg := _overlay(runs, names, name, unit)) is not None
    ]
    return element("div", *drawn, class_="plots") if drawn else Html("")


def _overlay(runs: Sequence[History], names: Sequence[str], metric: str, unit: str) -> str | None:
    with drawing() as (canvas, axes):
        ends: list[tuple[float, float, str, str]] = []
        for position, (run, name) in enumerate(zip(runs, names, strict=True)):
            y = smoothed(run.series(metric), run.weights.get(metric))
            if not np.isfinite(y).any():
                continue
            x, y = condensed(run.steps, y, points=250)
            color = series_color(position)
            axes.plot(x, y, color=color, linestyle=DASHES[position % len(DASHES)])
            ends.append((float(x[-1]), float(y[np.isfinite(y)][-1]), name[:14], color))
        if not ends:
            return None
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
        label_ends(axes, ends)
        return to_svg(canvas, metric.replace("/", "-"))


def _differences(sides: Sequence[dict[str, Any]], names: Sequence[str]) -> Html:
    """Dotted names whose values are not the same in all runs."""
    rows = [dict(flat(side)) for side in sides]
    every = dict.fromkeys(name for row in rows for name in row)
    different = [
        (shortened(name, MAX_CELL), *(shortened(row.get(name, "(none)"), MAX_CELL) for row in rows))
        for name in every
        if len({row.get(name) for row in rows}) > 1 and name != "run_dir"
    ]
    caption = f"{len(different) - MAX_ROWS} more are left out" if len(different) > MAX_ROWS else None
    return table(("", *names), different[:MAX_ROWS], caption) if different else Html("")


def _missing(runs: Sequence[History], names: Sequence[str]) -> Html:
    notes = [f"{name}: {note}" for run, name in zip(runs, names, strict=True) for note in run.notes]
    rows = [element("li", shortened(note, 400)) for note in notes[:MAX_ROWS]]
    return joined((element("ul", *rows),)) if rows else Html("")


def _seconds(run: History) -> float:
    return float(np.nansum(run.series("speed/seconds_per_step") * run.spans))


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if np.isfinite(value) else "–"
