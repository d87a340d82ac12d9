"""Plots as inline SVG whose colors are the page's: one drawing is readable in light and dark, and without color.

matplotlib draws with placeholder colors, which are then replaced by CSS variables. Lines also differ in dash pattern,
areas in hatching, and both are named where they end, so color is never the only cue.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#010101", "#010102", "#010103"
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    "-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 1)), (0, (9, 3)),
)  # fmt: skip
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----")
MAX_BUCKET = 255
"""Last bucket with a color of its own: a plan has at most 256."""
MAX_POINTS = 500
"""Points of a line at most; longer runs are averaged into as many equal stretches."""

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


def series_color(number: int) -> str:
    """Placeholder of the page's color for an unordered series."""
    return f"#0200{number % 6:02x}"


def bucket_color(number: int) -> str:
    """Placeholder of the page's color for a bucket; buckets are ordered, so their colors are a ramp."""
    return f"#0300{min(number, MAX_BUCKET):02x}"


@contextlib.contextmanager
def drawing(height: float = 2.4, width: float = 4.2) -> Generator[tuple[Figure, Axes]]:
    """A figure with one set of axes in the house style; sizes in inches of 72 px."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        # Fixed margins, in inches: room for tick labels and for the names at the right edge. Fitting them takes as long
        # as the drawing itself, and the browser's font is another one anyway.
        figure.subplots_adjust(left=0.62 / width, right=1 - 0.85 / width, bottom=0.42 / height, top=1 - 0.08 / height)
        yield figure, figure.add_subplot()


def to_svg(figure: Figure, key: str) -> str:
    """The figure as an ``<svg>`` element for a page.

    Args:
        figure: drawn inside `drawing`.
        key: unique on the page; prefixes every id, for ids of different drawings would otherwise clash.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": key}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<svg ", "<svg class='plot' ", re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2), count=1)
    text = re.sub(r'id="([^"]+)"', rf'id="{key}-\1"', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\1{key}-", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)
    return re.sub(r"#0([123])00([0-9a-f]{2})|#01010([123])", _color, text)


def _color(found: re.Match[str]) -> str:
    if found.group(3):
        return f"var(--{('ink', 'muted', 'grid')[int(found.group(3)) - 1]})"
    return f"var(--{'s' if found.group(1) == '2' else 'b'}{int(found.group(2), 16)})"


def condensed(x: np.ndarray, *ys: np.ndarray, points: int = MAX_POINTS) -> tuple[np.ndarray, ...]:
    """x and ys averaged into at most ``points`` equal stretches, NaN left out."""
    if x.size <= points:
        return (x, *ys)
    edges = np.linspace(0, x.size, points + 1).round().astype(int)
    return tuple(_stretch_means(column.astype(np.float64), edges) for column in (x, *ys))


def _stretch_means(column: np.ndarray, edges: np.ndarray) -> np.ndarray:
    good = np.isfinite(column)
    sums = np.concatenate([[0.0], np.cumsum(np.where(good, column, 0.0))])
    counts = np.concatenate([[0], np.cumsum(good)])
    total, count = sums[edges[1:]] - sums[edges[:-1]], counts[edges[1:]] - counts[edges[:-1]]
    return np.divide(total, count, out=np.full(total.size, np.nan), where=count > 0)


def smoothed(values: np.ndarray, weights: np.ndarray | None = None, share: float = 0.04) -> np.ndarray:
    """Centred moving ratio: Σ weight·value / Σ weight over a stretch of ``share`` of all points, at least five."""
    scale = np.ones(values.size) if weights is None else np.nan_to_num(weights, nan=0.0)
    good = np.isfinite(values) & (scale > 0)
    half = max(int(values.size * share / 2), 2)
    top = np.concatenate([[0.0], np.cumsum(np.where(good, values * scale, 0.0))])
    bottom = np.concatenate([[0.0], np.cumsum(np.where(good, scale, 0.0))])
    low = np.clip(np.arange(values.size) - half, 0, None)
    high = np.clip(np.arange(values.size) + half + 1, None, values.size)
    weight = bottom[high] - bottom[low]
    return np.divide(top[high] - top[low], weight, out=np.full(values.size, np.nan), where=weight > 0)


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Name lines where they end, at the right edge, pushed apart so that names do not overlap.

    Args:
        axes: limits must be final.
        ends: (x, y, name, color) a line.
    """
    low, high = axes.get_ylim()
    log = axes.get_yscale() == "log"
    span = np.log(high / low) if log else high - low
    known = [end for end in ends if np.isfinite(end[1])]
    places = sorted(((np.log(y / low) if log else y - low) / span, y, name, color) for _, y, name, color in known)
    gap, floor = 0.075, -1.0
    positions: list[float] = []
    for place, *_ in places:
        floor = max(place, floor + gap)
        positions.append(floor)
    overshoot = max(positions[-1] - 1.0, 0.0) if positions else 0.0
    for position, (_, _, name, color) in zip(positions, places, strict=True):
        axes.annotate(
            name,
            (1.01, position - overshoot),
            xycoords="axes fraction",
            color=color,
            va="center",
            annotation_clip=False,
        )
