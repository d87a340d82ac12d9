"""The report's plots, each a function from a history to an SVG, or None where the run logged nothing for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from paceline.report.svg import (
    DASHES,
    GRID,
    HATCHES,
    INK,
    MUTED,
    bucket_color,
    condensed,
    drawing,
    label_ends,
    series_color,
    smoothed,
    to_svg,
)
from paceline.report.values import number
from paceline.text import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from paceline.observe.run_history import History

STATES = {"busy": (2, HATCHES[0]), "starved": (1, HATCHES[1]), "blocked": (3, HATCHES[2])}
"""Series color and hatching of what a stage can be."""
MAX_SERIES = 16
"""Lines or bands of one plot: of more buckets, evenly spaced ones are drawn, and bands are put together."""
MAX_TREES = 5
"""Draft trees drawn, those of the smallest budgets."""
MAX_STARTS = 50
"""Resumptions drawn, the newest ones."""
MIN_CROPPED = 30
"""Fewer values than this are shown whole."""

Ends = list[tuple[float, float, str, str]]


def loss(run: History) -> str | None:
    """Loss of every step, and smoothed."""
    values = run.series("loss")
    if not np.isfinite(values).any():
        return None
    with drawing() as (figure, axes):
        x, raw = condensed(run.steps, values, points=1500)
        axes.plot(x, raw, color=MUTED, linewidth=0.6, alpha=0.6)
        ends: Ends = []
        _line(axes, run, "loss", "smoothed", 0, series_color(0), ends)
        _crop(axes, values)
        _finish(axes, run, "loss, nat", ends)
        return to_svg(figure, "loss")


def loss_by_bucket(run: History) -> str | None:
    """Smoothed loss of each bucket, shortest samples first."""
    return _buckets(run, "loss/bucket_{}", "loss, nat", "loss-bucket")


def acceptance(run: History, decoded: list[tuple[int, float]]) -> str | None:
    """τ of training blocks, τ of draft trees, and τ of real decoding where it was measured.

    Args:
        run: the run.
        decoded: (step, τ) of held-out decoding.
    """
    trees = run.numbers("tree/tau_{nodes}")[:MAX_TREES]
    if "tau" not in run.values and not decoded:
        return None
    with drawing() as (figure, axes):
        ends: Ends = []
        _line(axes, run, "tau", "training", 0, series_color(0), ends)
        for position, nodes in enumerate(trees, 1):
            _line(axes, run, f"tree/tau_{nodes}", f"tree {nodes}", position, series_color(position), ends)
        if decoded:
            x, y = zip(*decoded, strict=True)
            axes.plot(x, y, linestyle="", marker="D", markersize=6, markerfacecolor="none", color=INK)
            ends.append((x[-1], y[-1], "decoded ◇", INK))
        _finish(axes, run, "tokens per target pass", ends)
        return to_svg(figure, "tau")


def slots_over_time(run: History) -> str | None:
    """Accuracy of the first, a middle and the last slots over time."""
    slots = run.numbers("accuracy/slot_{slot}")
    if not slots:
        return None
    chosen = sorted({slots[round(i * (len(slots) - 1) / 4)] for i in range(5)}) if len(slots) > 5 else slots
    with drawing() as (figure, axes):
        ends: Ends = []
        for position, slot in enumerate(chosen):
            _line(axes, run, f"accuracy/slot_{slot}", f"slot {slot}", position, series_color(position), ends)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        _finish(axes, run, "accuracy", ends)
        return to_svg(figure, "slots-time")


def slots_now(run: History, decoded: dict[int, float]) -> str | None:
    """By slot, over the last tenth of the run: accuracy, and acceptance given that all earlier slots were accepted.

    Args:
        run: the run.
        decoded: the same acceptance in real decoding, by slot; may be empty.
    """
    slots = run.numbers("accuracy/slot_{slot}") or run.numbers("acceptance/slot_{slot}")
    if not slots:
        return None
    late = last_tenth(run)
    rates = {
        family: heights
        for family in ("accuracy", "acceptance")
        if np.isfinite(heights := [run.pooled(f"{family}/slot_{slot}", late) for slot in slots]).any()
    }
    if not rates and not decoded:
        return None
    with drawing() as (figure, axes):
        for position, (family, marker) in enumerate((("accuracy", "o"), ("acceptance", "s"))):
            if family in rates:
                look = {"color": series_color(position), "linestyle": DASHES[position], "marker": marker}
                axes.plot(slots, rates[family], markersize=4, label=family, **look)
        if decoded:
            axes.plot(
                *zip(*sorted(decoded.items()), strict=True), "D", color=INK, markerfacecolor="none", label="decoded"
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("slot")
        axes.legend(frameon=False)
        return to_svg(figure, "slots-now")


def mix(run: History, family: str, title: str, key: str) -> str | None:
    """Stacked shares of the buckets over time.

    Args:
        run: the run.
        family: ``samples/bucket_{}`` or another count by bucket.
        title: of the y axis.
        key: of the drawing.
    """
    buckets = run.numbers(family.format("{bucket}"))
    if not buckets:
        return None
    bands = [band.tolist() for band in np.array_split(buckets, min(len(buckets), MAX_SERIES))]
    counts = np.array(
        [sum(smoothed(run.counts(family.format(bucket)), share=0.01) for bucket in band) for band in bands]
    )
    total = counts.sum(axis=0)
    shares = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    x, *rows = condensed(run.steps, *shares, points=250)
    with drawing() as (figure, axes):
        areas = axes.stackplot(x, np.array(rows), linewidth=0.4, edgecolor=GRID)
        for area, band in zip(areas, bands, strict=True):
            area.set_facecolor(bucket_color(band[0]))
        axes.set_ylim(0, 1)
        axes.margins(x=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        middles = np.cumsum([row[-1] for row in rows]) - np.array([row[-1] for row in rows]) / 2
        names = [
            f"{'bucket ' if len(band) == 1 else ''}{'–'.join(map(str, band[:: max(len(band) - 1, 1)]))}"
            for band in bands
        ]
        ends = [(x[-1], float(y), name, MUTED) for name, y in zip(names, middles, strict=True)]
        axes.set_ylabel(title)
        axes.set_xlabel("step")
        label_ends(axes, _thinned(ends))
        return to_svg(figure, key)


def lengths(run: History) -> str | None:
    """Mean and longest sample of each window."""
    if "window/mean_length" not in run.values:
        return None
    with drawing() as (figure, axes):
        ends: Ends = []
        x, raw = condensed(run.steps, run.series("window/mean_length"), points=1500)
        axes.plot(x, raw, color=MUTED, linewidth=0.6, alpha=0.6)
        _line(axes, run, "window/mean_length", "mean", 0, series_color(0), ends)
        _line(axes, run, "window/max_length", "longest", 1, series_color(1), ends)
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
        _finish(axes, run, "tokens a sample", ends)
        axes.set_ylim(bottom=0)
        return to_svg(figure, "lengths")


def padding(run: History) -> str | None:
    """Real tokens / padded tokens over time."""
    if "padding_efficiency" not in run.values:
        return None
    with drawing() as (figure, axes):
        ends: Ends = []
        _line(axes, run, "padding_efficiency", "real", 0, series_color(0), ends)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(min(0.5, axes.get_ylim()[0]), 1.0)
        _finish(axes, run, "share of real tokens", ends)
        return to_svg(figure, "padding")


def gradient(run: History) -> str | None:
    """Gradient norm before clipping; skipped steps are marked."""
    norm = run.series("gradient/norm")
    if not np.isfinite(norm).any():
        return None
    with drawing() as (figure, axes):
        x, raw = condensed(run.steps, norm, points=1500)
        axes.plot(x, raw, color=MUTED, linewidth=0.6, alpha=0.6)
        ends: Ends = []
        _line(axes, run, "gradient/norm", "smoothed", 0, series_color(0), ends)
        good = norm[np.isfinite(norm) & (norm > 0)]
        if good.size and good.max() > 20 * np.median(good):
            axes.set_yscale("log")
        skipped = run.steps[run.counts("gradient/skipped") > 0]
        if skipped.size:
            axes.plot(skipped[:200], np.full(skipped[:200].size, axes.get_ylim()[0]), "x", color=INK, clip_on=False)
        clip = number((run.settings.get("optimizer") or {}).get("clip_norm"))
        if clip is not None and axes.get_ylim()[0] < clip < 2 * axes.get_ylim()[1]:
            axes.axhline(clip, color=INK, linewidth=0.8, linestyle=":")
            ends.append((float(run.steps[-1]), clip, "clip", INK))
        _finish(axes, run, "gradient norm", ends)
        return to_svg(figure, "gradient")


def stage(run: History, name: str) -> str | None:
    """Shares of one stage's time: busy, starved, blocked."""
    states = [state for state in STATES if f"stage/{name}/{state}" in run.values]
    if not states:
        return None
    rows = [smoothed(run.counts(f"stage/{name}/{state}"), share=0.02) for state in states]
    x, *parts = condensed(run.steps, *rows, points=250)
    with drawing(height=2.0) as (figure, axes):
        areas = axes.stackplot(x, np.array(parts), linewidth=0.6)
        for state, area in zip(states, areas, strict=True):
            color, hatch = STATES[state]
            area.set_facecolor(series_color(color) if state == "busy" else "none")
            area.set_edgecolor(series_color(color))
            area.set_hatch(hatch)
        axes.set_ylim(0, 1)
        axes.margins(x=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        ends_y = np.cumsum([part[-1] for part in parts]) - np.array([part[-1] for part in parts]) / 2
        ends = [
            (x[-1], float(y), state, series_color(STATES[state][0]))
            for state, y, part in zip(states, ends_y, parts, strict=True)
            if part.mean() > 0.02  # wherever it ends: a stage that is done is in no state
        ]
        axes.set_xlabel("step")
        label_ends(axes, ends)
        return to_svg(figure, f"stage-{name}")


def speed(run: History, name: str, title: str) -> str | None:
    """A rate over time."""
    if name not in run.values:
        return None
    with drawing(height=2.0) as (figure, axes):
        ends: Ends = []
        _line(axes, run, name, "", 0, series_color(0), ends)
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
        _finish(axes, run, title, [])
        axes.set_ylim(bottom=0)
        return to_svg(figure, name.replace("/", "-"))


def decoded_tau(run: History) -> list[tuple[int, float]]:
    """(step, τ) of each evaluation that says both."""
    found = []
    for entry in run.evaluations:
        tau = next((tau for key in ("tau_micro", "tau") if (tau := number(entry.get(key))) is not None), None)
        if tau is not None:
            found.append((entry["step"], tau))
    return found


def tick(value: float, _: int) -> str:
    """Text of an axis tick: SI prefixes for large numbers, plain digits for small ones."""
    return short(value) if abs(value) >= 1000 else f"{value:g}"


def last_tenth(run: History) -> slice:
    """The last tenth of a run's lines, at least one."""
    return slice(max(run.steps.size - max(run.steps.size // 10, 1), 0), None)


def _buckets(run: History, family: str, title: str, key: str) -> str | None:
    buckets = run.numbers(family.format("{bucket}"))
    if not buckets:
        return None
    if len(buckets) > MAX_SERIES:
        buckets = [buckets[round(i * (len(buckets) - 1) / (MAX_SERIES - 1))] for i in range(MAX_SERIES)]
    with drawing() as (figure, axes):
        ends: Ends = []
        for position, bucket in enumerate(buckets):
            _line(axes, run, family.format(bucket), f"bucket {bucket}", position, bucket_color(bucket), ends)
        _crop(axes, np.concatenate([run.series(family.format(bucket)) for bucket in buckets]))
        _finish(axes, run, title, _thinned(ends))
        return to_svg(figure, key)


def _line(axes: Axes, run: History, name: str, label: str, position: int, color: str, ends: Ends) -> None:
    """One smoothed metric over the steps; its end is noted for the label."""
    if name not in run.values:
        return
    raw = run.series(name)
    seen = np.isfinite(raw)
    if not seen.any():
        return
    dash = DASHES[position % len(DASHES)]
    if seen.mean() < 0.5 and "bucket" not in name:  # measured now and then: join what was measured
        x, y = condensed(run.steps[seen], raw[seen])
        axes.plot(x, y, color=color, linestyle=dash, marker=".", markersize=4)
    else:
        x, y = condensed(run.steps, smoothed(raw, run.weights.get(name)))
        axes.plot(x, y, color=color, linestyle=dash)
    last = y[np.isfinite(y)][-1]
    ends.append((float(x[-1]), float(last), label, color))


def _finish(axes: Axes, run: History, title: str, ends: Ends) -> None:
    axes.set_ylabel(title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.margins(x=0.01)
    for start in run.starts[1:][-MAX_STARTS:]:
        axes.axvline(start + 0.5, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
    label_ends(axes, ends)


def _crop(axes: Axes, values: np.ndarray) -> None:
    """Let the first few, huge losses run out of the top where they would flatten all others."""
    good = values[np.isfinite(values)]
    if good.size < MIN_CROPPED:
        return
    low, high = np.quantile(good, [0.0, 0.95])
    if good.max() - low > 1.6 * (high - low):
        axes.set_ylim(low - 0.1 * (high - low), high + 0.3 * (high - low))


def _thinned(ends: Ends) -> Ends:
    """At most eight names fit beside a plot: keep evenly spaced ones, first and last included."""
    if len(ends) <= 8:
        return ends
    keep = {round(i * (len(ends) - 1) / 7) for i in range(8)}
    return [end for position, end in enumerate(ends) if position in keep]
