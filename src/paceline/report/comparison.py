"""Two or more runs on one page: their figures side by side, their curves over one another, settings that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.diagnosis.mixture import explain_jitter
from paceline.observe.run_history import History, last_part, read_history
from paceline.report.drawing import DASHES, condensed, drawing, series_color, smoothed
from paceline.report.evaluations import conditions
from paceline.report.page import flat, render_page, save_page
from paceline.report.report import total
from paceline.text import duration, fixed, percent, short, shortened

COMPARISON_FILE = "comparison.html"

_CURVES = (
    ("loss", "Loss", "nat"),
    ("tau", "Training τ", "tokens per target pass"),
    ("held-out", "Held-out τ", "tokens per target pass"),
    ("window/mean_length", "Mean length of the step's samples", "tokens"),
    ("gradient/norm", "Gradient norm", ""),
    ("real_tokens_per_s", "Real tokens a second", "tokens/s"),
)


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the comparison of two or more runs.

    Args:
        run_dirs: directories of the runs; the first is the one that the others are compared with.
        out: HTML file.

    Returns:
        The file.

    Raises:
        RunDirectoryError: one of them is not a run, or the file cannot be written or is not a page.
    """
    return save_page(render_comparison([read_history(run_dir) for run_dir in run_dirs]), out)


def forked_at(runs: Sequence[History]) -> int | None:
    """The step up to which these runs are one: the first fork among them. None where one is no fork of the others."""
    origins = [run.facts.get("forked_from") for run in runs]
    places = {str(run.run_dir.absolute()) for run in runs}
    forks = [origin for origin in origins if origin is not None]
    roots = {origin["run"] for origin in forks}
    alone = [run for run, origin in zip(runs, origins, strict=True) if origin is None]
    of_one = len(roots) == 1 and all(str(run.run_dir.absolute()) in roots for run in alone)
    return min(int(origin["step"]) for origin in forks) if forks and (of_one or roots <= places) else None


def since(run: History, step: int) -> History:
    """What a run did after a step."""
    after = run.steps > step
    return replace(
        run,
        steps=run.steps[after],
        spans=run.spans[after],
        epochs=run.epochs[after],
        windows=run.windows[after],
        times=run.times[after],
        batches=[batches for batches, kept in zip(run.batches, after, strict=True) if kept],
        values={name: column[after] for name, column in run.values.items()},
        weights={name: column[after] for name, column in run.weights.items()},
        evaluations=[entry for entry in run.evaluations if entry["step"] > step],
    )


def render_comparison(runs: Sequence[History]) -> str:
    """The whole page."""
    names, fork = _names(runs), forked_at(runs)
    if fork is not None:
        runs = [since(run, fork) for run in runs]
    environments = [{key: value for key, value in run.facts.items() if key != "drafter"} for run in runs]
    return render_page(
        "comparison.html.j2",
        shortened(" / ".join(names), 200),
        names=names,
        fork=fork,
        figures_of=_figures(runs),
        warnings=[
            (name, f) for run, name in zip(runs, names, strict=True) for f in diagnose(run) if f.level == "warning"
        ],
        curves=[
            (_overlay(runs, names, key, unit), title, "Smoothed over 4 % of each run.") for key, title, unit in _CURVES
        ],
        settings=_differences([run.settings for run in runs]),
        drafters=_differences([run.facts.get("drafter", {}) for run in runs]),
        environments=_differences(environments),
        notes=[f"{name}: {note}" for run, name in zip(runs, names, strict=True) for note in run.notes],
    )


def _names(runs: Sequence[History]) -> list[str]:
    """Directory names, with a number where two are the same."""
    names = [run.name for run in runs]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _figures(runs: Sequence[History]) -> list[tuple[str, ...]]:
    jitters = [explain_jitter(run) for run in runs]
    deviations = [jitter.deviation if jitter else math.nan for jitter in jitters]
    # A line of many steps scatters less than one of a single step, whatever was trained.
    alike = [run.line == runs[0].line and deviations[0] > 0 for run in runs]
    ratios = [(d / deviations[0]) ** 2 if same else math.nan for d, same in zip(deviations, alike, strict=True)]
    newest = [run.evaluations[-1] if run.evaluations else {} for run in runs]
    seconds = [float(np.nansum(run.series("speed/seconds_per_step") * run.spans)) for run in runs]
    rows = [
        ("optimizer steps", *(str(run.steps[-1]) if run.steps.size else "–" for run in runs)),
        ("status", *(run.status for run in runs)),
        ("loss, last tenth", *(fixed(run.pooled("loss", last_part(run)), 3) for run in runs)),
        ("training τ, last tenth", *(fixed(run.pooled("tau", last_part(run))) for run in runs)),
        ("decoded τ", *(fixed(entry.get("tau_micro")) for entry in newest)),
        ("decoded at step", *(str(entry.get("step", "–")) for entry in newest)),
        ("decoded with", *(conditions(entry) for entry in newest)),
        ("a line of metrics is a", *(run.line for run in runs)),
        ("scatter of the loss of a line, nat", *(fixed(deviation, 4) for deviation in deviations)),
        ("its variance, first run = 1", *(fixed(ratio, 3) for ratio in ratios)),
        ("of it from the lengths in a line", *(percent(jitter.explained) if jitter else "–" for jitter in jitters)),
        ("real of padded tokens", *(percent(run.pooled("padding_efficiency")) for run in runs)),
        ("real tokens/s", *(short(run.pooled("real_tokens_per_s")) for run in runs)),
        ("draft positions/s", *(short(run.pooled("draft_positions_per_s")) for run in runs)),
        ("training time", *(duration(spent) for spent in seconds)),
        ("real tokens trained", *(short(total(run, "window/real_tokens")) for run in runs)),
    ]
    return [row for row in rows if any(cell != "–" for cell in row[1:])]


def _overlay(runs: Sequence[History], names: Sequence[str], metric: str, unit: str) -> str:
    curves = [_curve(run, metric) for run in runs]
    if not any(y.size for _, y in curves):
        return ""
    with drawing() as plot:
        for position, ((x, y), name) in enumerate(zip(curves, names, strict=True)):
            if y.size:
                color, dash = series_color(position), DASHES[position % len(DASHES)]
                plot.axes.plot(x, y, color=color, linestyle=dash, marker="." if y.size < 10 else "")
                plot.ends.append((float(y[-1]), shortened(name, 14), color))
        plot.finish("step", unit, form="short")
    return plot.source


def _curve(run: History, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a curve; none where nothing was measured."""
    if metric == "held-out":
        points = np.array(run.held_out_tau(), dtype=np.float64).reshape(-1, 2)
        return points[:, 0], points[:, 1]
    x, y = condensed(run.steps, smoothed(run.series(metric), run.weights.get(metric)), points=250)
    seen = np.isfinite(y)
    return x[seen], y[seen]


def _differences(sides: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Dotted names whose values are not the same in all runs; a run that has none at all is left out of account."""
    rows = [dict(flat(side)) for side in sides]
    known = [row for row in rows if row]
    every = dict.fromkeys(name for row in rows for name in row)
    return [
        (name, *(shortened(row.get(name, "(none)"), 300) for row in rows))
        for name in every
        if len({row.get(name) for row in known}) > 1 and name != "run_dir"
    ]
