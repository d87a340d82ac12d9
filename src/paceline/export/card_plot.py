"""The picture of a model card: τ by step, and how often the drafts of each slot are kept. matplotlib draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "acceptance.png"
COLOR = "#0072b2"


def draw_acceptance(evaluations: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw the picture.

    Args:
        evaluations: decoding of held-out prompts, oldest first, as `Origin.evaluations`.
        path: of the PNG file.

    Returns:
        Whether there was something to draw and the file was written.
    """
    by_step = [(entry["step"], entry["tau_micro"]) for entry in evaluations if entry.get("tau_micro") is not None]
    newest = evaluations[-1] if evaluations else {}
    slots = [
        (rate["slot"], 100 * rate["conditional"], 100 * rate["cumulative"])
        for rate in newest.get("slots") or ()
        if rate.get("conditional") is not None
    ]
    if not by_step and not slots:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.2), dpi=110, layout="constrained")
    steps, kept = figure.subplots(1, 2)
    steps.plot([step for step, _ in by_step], [tau for _, tau in by_step], color=COLOR, marker="o")
    steps.axhline(1.0, color="#1f2933", linewidth=0.8, linestyle=(0, (2, 3)))
    steps.set(title="τ of held-out prompts", xlabel="optimizer step", ylabel="tokens per target pass", ylim=(0, None))
    for column, label, dash in ((1, "if all before it were kept", "-"), (2, "of all blocks", "--")):
        kept.plot([row[0] for row in slots], [row[column] for row in slots], dash, color=COLOR, marker="o", label=label)
    kept.set(title=f"Drafts kept, step {newest['step']}", xlabel="draft slot", ylabel="%", ylim=(0, 103))
    kept.legend(frameon=False, fontsize=8)
    for axis in (steps, kept):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.savefig(path, metadata={"Software": None})
    return True
