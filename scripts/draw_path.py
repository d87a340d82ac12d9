"""Draws docs/img/path.svg: the way of the data through the packages, and the order in which packages may import.

python scripts/draw_path.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

OUT = Path(__file__).resolve().parent.parent / "docs" / "img" / "path.svg"
STAGES = (
    ("data", "chats → tokens\n+ loss mask", "SampleSource"),
    ("plan", "which samples\ntrain together", "PlannedBatch"),
    ("target_model", "frozen LLM,\ntapped", "HostBatch"),
    ("drafter", "learns to draft\na block", "FeatureBatch"),
    ("checkpoint", "resumable\nstate", "StepReport"),
    ("evaluate", "real decoding\n(decode)", ""),
    ("export", "folders for\nvLLM, SGLang", ""),
)
BLUE, GRAY, GREEN, DARK = "#dbe9f6", "#eeeeee", "#e2f0d9", "#1f3b57"


def box(axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str, color: str) -> None:
    """A rounded box with a title and a text."""
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02,rounding_size=0.08", fc=color, ec=DARK, lw=1)
    axes.add_patch(shape)
    middle = x + width / 2
    axes.text(middle, y + height - 0.2, title, ha="center", va="center", weight="bold", size=8.3, color=DARK)
    axes.text(middle, y + height / 2 - 0.16, text, ha="center", va="center", size=7.5, color="#333333")


def main() -> None:
    """Write the picture."""
    figure = Figure(figsize=(11, 3.4))
    axes = figure.add_subplot()
    width, gap, top = 1.32, 0.5, 2.1
    for number, (title, text, carries) in enumerate(STAGES):
        x = number * (width + gap)
        box(axes, x, top, width, 1.0, title, text, BLUE)
        if number + 1 < len(STAGES):
            ends = (x + width + 0.05, top + 0.5), (x + width + gap - 0.05, top + 0.5)
            axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=10, color=DARK))
        if carries:
            middle = x + width + gap / 2
            axes.text(middle, top + 1.12, carries, ha="center", va="bottom", size=7, color="#666666", rotation=18)
    pitch = width + gap
    text = "one process a device; bounded channels, one direction; nothing hangs"
    box(axes, pitch, 1.1, 3 * pitch + width, 0.7, "pipeline", text, GREEN)
    text = "metrics.jsonl, console, trackers, diagnosis — and report: the run explained afterwards"
    box(axes, 0, 0.15, 6 * pitch + width, 0.7, "observe", text, GRAY)
    axes.set_xlim(-0.1, 6 * pitch + width + 0.1)
    axes.set_ylim(0, 3.75)
    axes.axis("off")
    OUT.parent.mkdir(exist_ok=True)
    with rc_context({"svg.hashsalt": "paceline"}):  # the same file from the same script
        figure.savefig(OUT, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
