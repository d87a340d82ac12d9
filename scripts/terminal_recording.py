"""A command in a terminal, as a moving SVG: a real run, of which the screen is read several times.

    python scripts/terminal_recording.py docs/img/demo.svg --typed "paceline demo" -- paceline demo --run-dir runs/new

Long waits are shortened. The picture needs no script: CSS moves the frames. Where nothing moves (print, readers who
asked for less motion) it shows the last frame.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import pyte

COLUMNS = 124
CELL, LINE, EDGE, BAR = 8.4, 18, 14, 34  # pixels: width of a letter, height of a row, edge, title bar
BACKGROUND, INK = "#1b1b1f", "#d6d6d2"
COLORS = {
    "black": "#5b5b63", "red": "#e0705f", "green": "#86c77a", "brown": "#d9b35c",
    "blue": "#6ba4f5", "magenta": "#c58af0", "cyan": "#5fc4c9", "white": "#d6d6d2",
    "brightblack": "#77777f", "brightred": "#f0897a", "brightgreen": "#a5e09a", "brightbrown": "#f0cf80",
    "brightblue": "#8fbcff", "brightmagenta": "#f92f77", "brightcyan": "#8ae3e6", "brightwhite": "#ffffff",
}  # fmt: skip
"""What pyte calls the sixteen colors of a terminal."""

Row = tuple[tuple[str, str, bool], ...]
"""A row of the screen: runs of text with their color, and whether they are bold."""


@dataclass(frozen=True)
class Moment:
    """The screen at a time, in seconds from the start of the command."""

    time_s: float
    rows: tuple[Row, ...]


def record(command: Sequence[str], typed: str, num_rows: int, every_s: float, hidden: str) -> list[Moment]:
    """Run a command in a terminal; its screen every `every_s` seconds at most, where it changed, and at the end.

    Args:
        command: what is run.
        typed: what the picture shows as typed.
        num_rows: of the terminal.
        every_s: shortest time between two looks.
        hidden: left out wherever the command writes it.

    Raises:
        SystemExit: the command failed.
    """
    screen = pyte.Screen(COLUMNS, num_rows)
    stream = pyte.ByteStream(screen)
    stream.feed(f"\x1b[32m$\x1b[0m \x1b[1m{typed}\x1b[0m\r\n".encode())
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", num_rows, COLUMNS, 0, 0))
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(num_rows)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    start, moments = time.monotonic(), [Moment(0.0, _rows(screen))]
    for piece in _without(hidden.encode(), _output(ours)):
        stream.feed(piece)
        now = time.monotonic() - start
        if now - moments[-1].time_s >= every_s:
            moments.append(Moment(now, _rows(screen)))
    moments.append(Moment(time.monotonic() - start, _rows(screen)))
    if process.wait():
        sys.exit(f"error: {' '.join(command)} ended with code {process.returncode}:\n" + "\n".join(screen.display))
    return [
        moment
        for moment, last in zip(moments, [None, *moments], strict=False)
        if last is None or moment.rows != last.rows
    ]


def _output(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # how Linux says that the other side of a terminal is closed
            return
        if not piece:
            return
        yield piece


def _without(hidden: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The output without `hidden`, which may begin in one piece and end in the next."""
    rest = b""
    for piece in pieces:
        text = (rest + piece).replace(hidden, b"") if hidden else piece
        kept = next((n for n in range(len(hidden) - 1, 0, -1) if text.endswith(hidden[:n])), 0)
        rest = text[len(text) - kept :]
        yield text[: len(text) - kept]
    yield rest


def _rows(screen: pyte.Screen) -> tuple[Row, ...]:
    rows = []
    for line in range(screen.lines):
        cells = [screen.buffer[line][column] for column in range(COLUMNS)]
        runs = groupby(cells, key=lambda cell: (_color(cell.fg), cell.bold))
        rows.append(tuple(("".join(cell.data for cell in run), color, bold) for (color, bold), run in runs))
    return tuple(rows)


def _color(name: str) -> str:
    if name == "default":
        return INK
    return COLORS.get(name) or f"#{name}"  # pyte gives the colors behind the first sixteen as six digits


def drawing(moments: Sequence[Moment], name: str, *, longest_s: float, last_s: float) -> str:
    """The moving picture: a moment is seen as long as it lasted, `longest_s` at most; the last one for `last_s`."""
    pauses = [min(later.time_s - sooner.time_s, longest_s) for sooner, later in pairwise(moments)]
    shown_s = [*pauses, last_s]
    total_s, height = sum(shown_s), len(moments[0].rows) * LINE
    names: dict[Row, str] = {}
    frames, steps, passed_s = [], [], 0.0
    for index, (moment, seconds) in enumerate(zip(moments, shown_s, strict=True)):
        uses = "".join(
            f'<use href="#{names.setdefault(row, f"r{len(names)}")}" y="{line * LINE}"/>'
            for line, row in enumerate(moment.rows)
            if any(text.strip() for text, _, _ in row)
        )
        frames.append(f'<g transform="translate(0 {index * height})">{uses}</g>')
        steps.append(f"{100 * passed_s / total_s:.2f}%{{transform:translateY({-index * height}px)}}")
        passed_s += seconds
    rows = "".join(f'<g id="{name}">{_text(row)}</g>' for row, name in names.items())
    wide, high = COLUMNS * CELL + 2 * EDGE, height + BAR + EDGE
    dots = "".join(f'<circle cx="{EDGE + 6 + 18 * n}" cy="{BAR / 2}" r="5.5" fill="#55555d"/>' for n in range(3))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" viewBox="0 0 {wide:g} {high:g}"
 role="img" aria-label="{escape(name)}">
<style>
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}}
.b{{font-weight:700}}
#strip{{transform:translateY({-(len(moments) - 1) * height}px);animation:play {total_s:.1f}s step-end infinite}}
@keyframes play{{{"".join(steps)}}}
@media (prefers-reduced-motion:reduce){{#strip{{animation:none}}}}
</style>
<defs>{rows}<clipPath id="window"><rect width="{COLUMNS * CELL:g}" height="{height}"/></clipPath></defs>
<rect width="{wide:g}" height="{high:g}" rx="9" fill="{BACKGROUND}"/>
{dots}
<g transform="translate({EDGE} {BAR})" clip-path="url(#window)"><g id="strip">
{chr(10).join(frames)}
</g></g></svg>
"""


def _text(row: Row) -> str:
    """Runs of text at their columns; `textLength` keeps the columns, whatever letters the reader's computer has."""
    column, found = 0, []
    for text, color, bold in row:
        shown = text.rstrip()
        lead = len(shown) - len(shown.lstrip())
        if shown := shown.strip():
            found.append(
                f'<text x="{(column + lead) * CELL:.1f}" y="14" fill="{color}" textLength="{len(shown) * CELL:.1f}"'
                f"{' class=' + chr(34) + 'b' + chr(34) if bold else ''}>{escape(shown, quote=False)}</text>"
            )
        column += len(text)
    return "".join(found)


def main() -> None:
    """Record the command, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--typed", help="what the picture shows as typed; unset: the command")
    parser.add_argument("--rows", type=int, default=34, help="height of the terminal")
    parser.add_argument("--every-s", type=float, default=2.5, help="seconds between two looks at the screen")
    parser.add_argument("--most", type=int, default=80, help="frames at most; of more, evenly spaced ones are taken")
    parser.add_argument("--longest-s", type=float, default=0.4, help="longest time that a frame but the last is seen")
    parser.add_argument("--last-s", type=float, default=6.0, help="time that the last frame is seen")
    parser.add_argument("--hide", default="", help="text to leave out, such as the folder of the project")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    typed = asked.typed or shlex.join([Path(asked.command[0]).name, *asked.command[1:]])
    moments = record(asked.command, typed, asked.rows, asked.every_s, asked.hide)
    moments = [*moments[: -1 : math.ceil(len(moments) / asked.most)], moments[-1]]
    picture = drawing(moments, typed, longest_s=asked.longest_s, last_s=asked.last_s)
    asked.out.write_text(picture, encoding="utf-8")
    print(f"{asked.out}: {len(moments)} frames, {len(picture.encode()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
