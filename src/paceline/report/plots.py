"""The plots of one run, each a function from a history to the address of a picture; empty where nothing was logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.observe.run_history import History, last_part
from paceline.report.drawing import (
    DASHES,
    GRID,
    HATCHES,
    INK,
    MUTED,
    WIDE,
    WIDTH,
    Drawing,
    bucket_color,
    condensed,
    crop,
    drawing,
    series_color,
    smoothed,
)

STATES = {"busy": (2, HATCHES[0]), "starved": (1, HATCHES[1]), "blocked": (3, HATCHES[2])}
"""Series color and hatching of what a stage can be."""
MAX_SERIES = 16
"""Lines or bands of one plot: of more buckets, evenly spaced ones are drawn, and bands are put together."""
MAX_TREES = 4
"""Draft trees drawn, those of the smallest budgets."""
MAX_STARTS = 50
"""Resumptions drawn, the newest ones."""


def loss(run: History) -> str:
    """Loss of every step, and smoothed."""
    values = run.series("loss")
    if not np.isfinite(values).any():
        return ""
    with drawing(WIDE) as plot:
        _raw(plot, run, "loss")
        _line(plot, run, "loss", "smoothed", 0)
        crop(plot.axes, values)
        _finish(plot, run, "loss, nat")
    return plot.source


def loss_by_bucket(run: History) -> str:
    """Smoothed loss of each bucket, shortest samples first."""
    buckets = run.numbers("loss/bucket_{bucket}")
    if not buckets:
        return ""
    last = max(buckets[-1], 1)
    if len(buckets) > MAX_SERIES:
        buckets = [buckets[round(i * (len(buckets) - 1) / (MAX_SERIES - 1))] for i in range(MAX_SERIES)]
    with drawing(WIDE) as plot:
        for position, bucket in enumerate(buckets):
            _line(plot, run, f"loss/bucket_{bucket}", f"bucket {bucket}", position, color=bucket_color(bucket / last))
        crop(plot.axes, np.concatenate([run.series(f"loss/bucket_{bucket}") for bucket in buckets]))
        _finish(plot, run, "loss, nat")
    return plot.source


def acceptance(run: History) -> str:
    """τ of training blocks, of held-out blocks and of decoded held-out prompts in one picture, and of draft trees."""
    decoded = run.decoded_tau()
    if "tau" not in run.values and not decoded:
        return ""
    with drawing() as plot:
        _line(plot, run, "tau", "training", 0)
        _line(plot, run, "validation/tau", "held-out", 1)
        for position, nodes in enumerate(run.numbers("tree/tau_{nodes}")[:MAX_TREES], 2):
            _line(plot, run, f"tree/tau_{nodes}", f"tree {nodes}", position)
        if decoded:
            x, y = zip(*decoded, strict=True)
            plot.axes.plot(x, y, linewidth=0.8, marker="D", markersize=5, markerfacecolor="none", color=INK)
            plot.ends.append((y[-1], "decoded ◇", INK))
        _finish(plot, run, "tokens per target pass")
    return plot.source


def slots_over_time(run: History) -> str:
    """Accuracy of the first, a middle and the last slots over time."""
    slots = run.numbers("accuracy/slot_{slot}")
    if not slots:
        return ""
    chosen = sorted({slots[round(i * (len(slots) - 1) / 4)] for i in range(5)}) if len(slots) > 5 else slots
    with drawing() as plot:
        for position, slot in enumerate(chosen):
            _line(plot, run, f"accuracy/slot_{slot}", f"slot {slot}", position)
        _finish(plot, run, "accuracy", form="percent")
    return plot.source


def slots_now(run: History) -> str:
    """By slot, over the last tenth of the run: accuracy, and acceptance given that all earlier slots were accepted."""
    slots = run.numbers("accuracy/slot_{slot}")
    decoded = decoded_slots(run)
    if not slots and not decoded:
        return ""
    late = last_part(run)
    with drawing() as plot:
        for position, (family, marker) in enumerate((("accuracy", "o"), ("acceptance", "s"))):
            rates = np.array([run.pooled(f"{family}/slot_{slot}", late) for slot in slots])
            seen = np.isfinite(rates)
            if seen.any():
                look = {"color": series_color(position), "linestyle": DASHES[position], "marker": marker}
                plot.axes.plot(np.array(slots)[seen], rates[seen], markersize=4, **look)
                plot.ends.append((float(rates[seen][-1]), family, series_color(position)))
        if decoded:
            x, y = zip(*decoded, strict=True)
            plot.axes.plot(x, y, "D", color=INK, markerfacecolor="none")
            plot.ends.append((y[-1], "decoded ◇", INK))
        plot.axes.set_ylim(bottom=0)
        plot.finish("slot", "share", form="percent")
    return plot.source


def decoded_slots(run: History) -> list[tuple[int, float]]:
    """(slot, acceptance given that all earlier ones were accepted) in the newest evaluation."""
    slots = run.evaluations[-1].get("slots", []) if run.evaluations else []
    return [(slot["slot"], slot["conditional"]) for slot in slots if slot["conditional"] is not None]


def served_speed(entry: Mapping[str, Any]) -> str:
    """Output tokens/s of a measured server by requests at once, with and without its drafter."""
    with drawing() as plot:
        for position, (key, name) in enumerate((("speeds", "drafter"), ("baseline_speeds", "without"))):
            points = [(speed["concurrency"], speed["tokens_per_second"]) for speed in entry.get(key) or ()]
            _marked(plot, points, name, position)
        plot.axes.set_ylim(bottom=0)
        plot.finish("requests at once", "output tokens/s", form="short")
    return plot.source


def served_slots(entry: Mapping[str, Any], run: History) -> str:
    """Acceptance by slot as a server counted it, beside that of decoding here."""
    found = [
        (slot["slot"], slot["conditional"]) for slot in entry.get("slots") or () if slot["conditional"] is not None
    ]
    if not found:
        return ""
    with drawing() as plot:
        _marked(plot, found, "server", 0)
        _marked(plot, decoded_slots(run), "decoded here", 1)
        plot.axes.set_ylim(0, 1)
        plot.finish("slot", "accepted, given those before", form="percent")
    return plot.source


def _marked(plot: Drawing, points: Sequence[tuple[float, float]], name: str, position: int) -> None:
    """A line through a few points, named where it ends."""
    if points:
        x, y = zip(*points, strict=True)
        plot.axes.plot(x, y, color=series_color(position), linestyle=DASHES[position], marker="os"[position])
        plot.ends.append((y[-1], name, series_color(position)))


def mix(run: History) -> str:
    """Shares of the buckets in the samples over time, stacked."""
    buckets = run.numbers("samples/bucket_{bucket}")
    if not buckets:
        return ""
    bands = [band.tolist() for band in np.array_split(buckets, min(len(buckets), MAX_SERIES))]
    counts = np.array([sum(smoothed(run.counts(f"samples/bucket_{b}"), share=0.01) for b in band) for band in bands])
    total = counts.sum(axis=0)
    shares = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    x, *rows = condensed(run.steps, *shares, points=250)
    colors = [bucket_color(band[0] / max(buckets[-1], 1)) for band in bands]
    names = [
        f"{'bucket ' * (len(band) == 1)}{'–'.join(map(str, dict.fromkeys((band[0], band[-1]))))}" for band in bands
    ]
    with drawing() as plot:
        _stack(plot, x, np.array(rows), [{"facecolor": color, "edgecolor": GRID} for color in colors])
        plot.ends += [(y, name, MUTED) for y, name in zip(_middles(rows), names, strict=True)]
        plot.finish("step", "share of samples", form="percent")
    return plot.source


def lengths(run: History) -> str:
    """Mean and longest sample of each window."""
    if "window/mean_length" not in run.values:
        return ""
    with drawing() as plot:
        _raw(plot, run, "window/mean_length")
        _line(plot, run, "window/mean_length", "mean", 0)
        _line(plot, run, "window/max_length", "longest", 1)
        plot.axes.set_ylim(bottom=0)
        _finish(plot, run, "tokens a sample", form="short")
    return plot.source


def gradient(run: History) -> str:
    """Gradient norm before clipping; skipped steps are marked."""
    norm = run.series("gradient/norm")
    good = norm[np.isfinite(norm) & (norm > 0)]
    if not good.size:
        return ""
    with drawing(WIDE) as plot:
        axes = plot.axes
        _raw(plot, run, "gradient/norm")
        _line(plot, run, "gradient/norm", "smoothed", 0)
        if good.max() > 20 * np.median(good):
            axes.set_yscale("log")
        skipped = run.steps[run.counts("gradient/skipped") > 0][:200]
        if skipped.size:
            axes.plot(skipped, np.full(skipped.size, axes.get_ylim()[0]), "x", color=INK, clip_on=False)
        clip = run.setting("optimizer", "clip_norm")
        if clip is not None and axes.get_ylim()[0] < clip < 2 * axes.get_ylim()[1]:
            axes.axhline(clip, color=INK, linewidth=0.8, linestyle=":")
            plot.ends.append((clip, "clip", INK))
        _finish(plot, run, "gradient norm")
    return plot.source


def metric(run: History, name: str, unit: str, *, form: str = "short", wide: bool = False) -> str:
    """One metric over time, from 0."""
    if not np.isfinite(run.series(name)).any():
        return ""
    with drawing(WIDE if wide else WIDTH) as plot:
        _line(plot, run, name, "", 0)
        plot.axes.set_ylim(bottom=0)
        if form == "percent":
            plot.axes.set_ylim(top=1)
        _finish(plot, run, unit, form=form)
    return plot.source


def stage(run: History, name: str) -> str:
    """Shares of one stage's time: busy, starved, blocked."""
    states = [state for state in STATES if f"stage/{name}/{state}" in run.values]
    if not states:
        return ""
    rows = [smoothed(run.counts(f"stage/{name}/{state}"), share=0.02) for state in states]
    x, *parts = condensed(run.steps, *rows, points=250)
    looks = []
    for state in states:
        color = series_color(STATES[state][0])
        looks.append({"facecolor": color if state == "busy" else "none", "edgecolor": color, "hatch": STATES[state][1]})
    with drawing() as plot:
        _stack(plot, x, np.array(parts), looks)
        plot.ends += [
            (y, state, series_color(STATES[state][0]))
            for state, y, part in zip(states, _middles(parts), parts, strict=True)
            if part.mean() > 0.02  # wherever it ends: a stage that has finished is in no state
        ]
        plot.finish("step", "share of time", form="percent")
    return plot.source


def _stack(plot: Drawing, x: np.ndarray, rows: np.ndarray, looks: list[dict[str, str]]) -> None:
    for area, look in zip(plot.axes.stackplot(x, rows, linewidth=0.5), looks, strict=True):
        area.set(**look)
    plot.axes.set_ylim(0, 1)
    plot.axes.margins(x=0)


def _middles(rows: list[np.ndarray]) -> list[float]:
    """Middle of each stacked row over its last tenth: what the last steps alone show may be no more than the end."""
    heights = np.array([row[-max(len(row) // 10, 1) :].mean() for row in rows])
    return [float(y) for y in np.cumsum(heights) - heights / 2]


def _raw(plot: Drawing, run: History, name: str) -> None:
    x, raw = condensed(run.steps, run.series(name), points=1500)
    plot.axes.plot(x, raw, color=MUTED, linewidth=0.6, alpha=0.6)


def _line(plot: Drawing, run: History, name: str, label: str, position: int, *, color: str | None = None) -> None:
    """One smoothed metric over the steps, named where it ends."""
    raw = run.series(name)
    seen = np.isfinite(raw)
    if not seen.any():
        return
    color, dash = color or series_color(position), DASHES[position % len(DASHES)]
    if seen.mean() < 0.5 and "bucket" not in name:  # measured now and then: join what was measured
        x, y = condensed(run.steps[seen], raw[seen])
        plot.axes.plot(x, y, color=color, linestyle=dash, marker=".", markersize=4)
    else:
        x, y = condensed(run.steps, smoothed(raw, run.weights.get(name)))
        plot.axes.plot(x, y, color=color, linestyle=dash)
    if label:
        plot.ends.append((float(y[np.isfinite(y)][-1]), label, color))


def _finish(plot: Drawing, run: History, y_label: str, *, form: str = "plain") -> None:
    plot.axes.margins(x=0.01)
    for start in run.starts[1:][-MAX_STARTS:]:
        plot.axes.axvline(start + 0.5, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
    for event in [event for event in run.events if event.event in ("settings", "forked")][-MAX_STARTS:]:
        plot.axes.axvline(event.step + 0.5, color=INK, linewidth=1.0)
    plot.finish("step", y_label, form=form)
