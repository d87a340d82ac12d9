"""How the report draws: one style, series distinct without color, lines named where they end, SVG in a data address.

Drawings are made once, for a light page, on a transparent ground; on a dark page the style sheet inverts them.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import warnings
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from paceline.text import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1c1c1a", "#5f5f59", "#cfcfc8"
SERIES = ("#2a6fd0", "#c2541a", "#11805f", "#7452cf", "#b83a76", "#7d6200")
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    "-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 1)), (0, (9, 3)),
)  # fmt: skip
HATCHES = ("", "////", "....")
FIRST_BUCKET, LAST_BUCKET = np.array([0x6A, 0xA4, 0xE6]), np.array([0x09, 0x22, 0x4C])
"""Colors of the shortest and the longest bucket: buckets are ordered, so their colors are a ramp."""
MAX_POINTS = 500
"""Points of a line at most; longer runs are averaged into as many equal stretches."""
MIN_CROPPED = 30
"""Fewer values than this are shown whole."""
WIDTH, WIDE, HEIGHT = 4.6, 6.2, 2.7
"""Inches of 72 px: three drawings, or two wide ones, fill the page's width, with letters of 11 to 13 px."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}

Ends = list[tuple[float, str, str]]
"""Of lines that end at the right edge: (y, name, color)."""


class Drawing:
    """A figure with one set of axes; ``source`` is its SVG as a data address, once the block in `drawing` has ended."""

    def __init__(self, width: float) -> None:
        self.figure = Figure(figsize=(width, HEIGHT))
        # Fixed margins, in inches: room for tick labels and for the names at the right edge. Fitting them takes as long
        # as the drawing itself, and the browser's font is another one anyway.
        margins = {"left": 0.72 / width, "right": 1 - 0.95 / width, "bottom": 0.42 / HEIGHT, "top": 1 - 0.1 / HEIGHT}
        self.figure.subplots_adjust(**margins)
        self.axes: Axes = self.figure.add_subplot()
        self.ends: Ends = []
        self.source = ""

    def finish(self, x_label: str, y_label: str, *, form: str = "plain") -> None:
        """Labels, ticks and the names of the lines; limits must be final.

        Args:
            x_label, y_label: of the axes.
            form: of the y axis: ``plain``, ``percent`` or ``short``.
        """
        axes = self.axes
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if form == "percent":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        elif form == "short":
            axes.yaxis.set_major_formatter(FuncFormatter(tick))
        _name_ends(axes, _thinned(self.ends))
        if not self.ends:  # no names: the axes may have their room, but for half of the last tick label
            self.figure.subplots_adjust(right=1 - 0.25 / self.figure.get_figwidth())


@contextlib.contextmanager
def drawing(width: float = WIDTH) -> Generator[Drawing]:
    """A drawing in the report's style; ``width`` in inches, `WIDTH` or `WIDE`."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Fonts are the browser's; what matplotlib finds for its own layout does not matter.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        found = Drawing(width)
        yield found
        buffer = io.StringIO()
        found.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        found.source = "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue().encode()).decode()


def series_color(number: int) -> str:
    """Color of an unordered series."""
    return SERIES[number % len(SERIES)]


def bucket_color(place: float) -> str:
    """Color of a bucket, by its place from 0 (shortest) to 1 (longest)."""
    red, green, blue = (FIRST_BUCKET + (LAST_BUCKET - FIRST_BUCKET) * place).round().astype(int)
    return f"#{red:02x}{green:02x}{blue:02x}"


def tick(value: float, _: int) -> str:
    """Text of an axis tick: ``12k``, ``0.25``, ``2e-4``."""
    if abs(value) >= 1000:
        return short(value)
    if abs(value) >= 0.01 or value == 0:
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    return f"{value / 10**exponent:.3g}e{exponent}"


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
    """Centered moving ratio: Σ weight·value / Σ weight over a stretch of ``share`` of all points, at least five."""
    scale = np.ones(values.size) if weights is None else np.nan_to_num(weights, nan=0.0)
    good = np.isfinite(values) & (scale > 0)
    half = max(int(values.size * share / 2), 2)
    top = np.concatenate([[0.0], np.cumsum(np.where(good, values * scale, 0.0))])
    bottom = np.concatenate([[0.0], np.cumsum(np.where(good, scale, 0.0))])
    low = np.clip(np.arange(values.size) - half, 0, None)
    high = np.clip(np.arange(values.size) + half + 1, None, values.size)
    weight = bottom[high] - bottom[low]
    return np.divide(top[high] - top[low], weight, out=np.full(values.size, np.nan), where=weight > 0)


def crop(axes: Axes, values: np.ndarray) -> None:
    """Let the first few, huge values run out of the top where they would flatten all others."""
    good = values[np.isfinite(values)]
    if good.size < MIN_CROPPED:
        return
    low, high = np.quantile(good, [0.0, 0.95])
    if good.max() - low > 1.6 * (high - low):
        axes.set_ylim(low - 0.1 * (high - low), high + 0.3 * (high - low))


def _name_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Name lines where they end, at the right edge, pushed apart so that names do not overlap."""
    low, high = axes.get_ylim()
    log = axes.get_yscale() == "log"
    span = np.log(high / low) if log else high - low
    places = sorted(((np.log(y / low) if log else y - low) / span, name, color) for y, name, color in ends)
    gap, floor = 0.085, -1.0
    positions: list[float] = []
    for place, *_ in places:
        floor = max(place, floor + gap)
        positions.append(floor)
    overshoot = max(positions[-1] - 1.0, 0.0) if positions else 0.0
    for position, (_, name, color) in zip(positions, places, strict=True):
        where = (1.01, position - overshoot)
        axes.annotate(name, where, xycoords="axes fraction", color=color, va="center", annotation_clip=False)


def _thinned(ends: Ends) -> Ends:
    """At most eight names fit beside a plot: keep evenly spaced ones, first and last included."""
    if len(ends) <= 8:
        return ends
    keep = {round(i * (len(ends) - 1) / 7) for i in range(8)}
    return [end for position, end in enumerate(ends) if position in keep]
