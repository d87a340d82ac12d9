"""A plan as a picture: lengths, buckets, the mixture of the windows over the epoch, and what each step sees.

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import PlanError
from paceline.plan.epoch import EpochPlan
from paceline.plan.forecast import Forecast
from paceline.plan.metrics import batch_totals, whole_windows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (".png", ".svg")
RAMP = ("#c6dbef", "#08306b")
"""Colour of the shortest and of the longest bucket."""
ACCENT, MUTED, INK = "#d95f0e", "#9aa5b1", "#1f2933"
SLICES = 120
"""Pieces of an epoch whose mixture is drawn."""


def draw_plan(plan: EpochPlan, forecast: Forecast, path: Path) -> None:
    """Writes the picture of one plan.

    Args:
        plan, forecast: of the same settings, first epoch.
        path: .png or .svg.

    Raises:
        PlanError: another kind of file, or it cannot be written.
    """
    figure = _figure(11.0, 7.2)
    axes = figure.subplots(2, 2)
    colors = _ramp(len(forecast.buckets))
    _draw_lengths(axes[0][0], plan, forecast, colors)
    _draw_shares(axes[0][1], forecast)
    _draw_mixture(axes[1][0], plan, colors)
    _draw_steps(axes[1][1], plan, forecast)
    figure.suptitle(
        f"{forecast.strategy} × {forecast.schedule}: {forecast.num_samples:,} samples, {forecast.num_batches:,} "
        f"micro-batches, {forecast.num_windows:,} steps, {forecast.efficiency:.1%} of the tokens are real",
        fontsize=12,
        color=INK,
    )
    _save(figure, path)


def draw_comparison(forecasts: Sequence[Forecast], path: Path) -> None:
    """Writes the picture of several plans: padding against step-to-step noise; arguments as for `draw_plan`."""
    figure = _figure(8.6, 5.4)
    axis = figure.subplots()
    strategies = list(dict.fromkeys(made.strategy for made in forecasts))
    schedules = list(dict.fromkeys(made.schedule for made in forecasts))
    from matplotlib import colormaps

    color = {name: colormaps["tab10"](number) for number, name in enumerate(strategies)}
    marker = dict(zip(schedules, "osD^vP", strict=False))
    for made in forecasts:
        axis.scatter(
            made.step_deviation_tokens, 100 * made.efficiency, s=54, alpha=0.85, linewidths=0,
            color=color[made.strategy], marker=marker[made.schedule],
        )  # fmt: skip
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color[name], marker="o", linestyle="", label=name) for name in strategies]
    handles += [Line2D([], [], linestyle="", label="")]
    handles += [Line2D([], [], color=MUTED, marker=marker[name], linestyle="", label=name) for name in schedules]
    axis.legend(handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_major_formatter("{x:.0f}")
    axis.set_xlabel(
        "spread of the steps' mean length, weighed as in the loss (tokens, standard deviation; less is calmer)"
    )
    axis.set_ylabel("real tokens, % of padded")
    axis.set_title("Padding and noise of every strategy × schedule", fontsize=11, color=INK, loc="left")
    _tidy(axis)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def _ramp(count: int) -> list[Any]:
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("paceline", RAMP)
    return [ramp(number / max(count - 1, 1)) for number in range(count)]


def _tidy(axis: Axes) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(labelsize=8)
    axis.grid(True, alpha=0.25, linewidth=0.6)
    axis.set_axisbelow(True)


def _draw_lengths(axis: Axes, plan: EpochPlan, forecast: Forecast, colors: Sequence[Any]) -> None:
    longest = int(plan.edges[-1])
    ends = np.linspace(0, longest, 65)
    counts, _ = np.histogram(plan.lengths, ends)
    owner = np.minimum(np.searchsorted(plan.edges, (ends[:-1] + ends[1:]) / 2), len(colors) - 1)
    axis.bar(ends[:-1], counts, np.diff(ends), align="edge", color=[colors[number] for number in owner])
    for edge in plan.edges[:-1].tolist():
        axis.axvline(edge, color=INK, linewidth=0.6, alpha=0.5)
    axis.set_xlabel("tokens of a sample (color: bucket)", fontsize=9)
    axis.set_ylabel("samples", fontsize=9)
    axis.set_title("Lengths", fontsize=10, loc="left", color=INK)
    _tidy(axis)


def _draw_shares(axis: Axes, forecast: Forecast) -> None:
    rows = forecast.buckets
    place = np.arange(len(rows))
    series = {
        "of the samples": ([row.share_samples for row in rows], MUTED),
        "of the tokens": ([row.share_tokens for row in rows], "#6baed6"),
        "of the micro-batches": ([row.share_batches for row in rows], ACCENT),
    }
    for number, (name, (values, color)) in enumerate(series.items()):
        axis.bar(place + 0.27 * (number - 1), [100 * value for value in values], 0.25, label=name, color=color)
    axis.set_xticks(place, [f"{row.low}–\n{row.high}" for row in rows], fontsize=7)
    axis.set_xlabel("bucket (tokens of a sample)", fontsize=9)
    axis.set_ylabel("share, %", fontsize=9)
    axis.set_title("What a bucket is a share of", fontsize=10, loc="left", color=INK)
    axis.legend(frameon=False, fontsize=8)
    _tidy(axis)


def _draw_mixture(axis: Axes, plan: EpochPlan, colors: Sequence[Any]) -> None:
    pieces = np.array_split(plan.buckets, min(SLICES, plan.num_batches))
    shares = np.array([np.bincount(piece, minlength=len(colors))[: len(colors)] / len(piece) for piece in pieces])
    place = np.linspace(0, 100, len(pieces))
    axis.stackplot(place, 100 * shares.T, colors=colors, linewidth=0)
    axis.set_xlim(0, 100)
    axis.set_ylim(0, 100)
    axis.set_xlabel("progress of the epoch, %", fontsize=9)
    axis.set_ylabel("micro-batches by bucket, %", fontsize=9)
    axis.set_title("Mixture over the epoch (even bands are good)", fontsize=10, loc="left", color=INK)
    _tidy(axis)


def _draw_steps(axis: Axes, plan: EpochPlan, forecast: Forecast) -> None:
    totals = batch_totals(plan)
    means = totals.real_tokens / totals.samples
    batches = means[:: max(len(means) // 4000, 1)]
    axis.scatter(
        np.linspace(0, 100, len(batches)), batches, s=2, color=MUTED, alpha=0.35, linewidths=0, rasterized=True
    )
    windows = whole_windows(plan, means).mean(axis=1)
    windows = windows[:: max(len(windows) // 4000, 1)]
    if len(windows):
        axis.plot(np.linspace(0, 100, len(windows)), windows, color=ACCENT, linewidth=0.7)
    axis.set_xlim(0, 100)
    axis.set_xlabel("progress of the epoch, %", fontsize=9)
    axis.set_ylabel("mean tokens of a sample", fontsize=9)
    axis.set_title(
        f"What a step sees (line; dots: micro-batches); spread {forecast.batch_mean_deviation_tokens:,.0f} tokens",
        fontsize=10,
        loc="left",
        color=INK,
    )
    _tidy(axis)


def _save(figure: Figure, path: Path) -> None:
    if path.suffix.lower() not in KINDS:
        raise PlanError(f"{path}: a picture is written as {' or '.join(KINDS)}; name the file so")
    import matplotlib

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "paceline", "svg.fonttype": "none"}):
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise PlanError(f"{path}: cannot be written ({error})") from error
