"""The picture of a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.image import imread

from paceline.export.card_plot import draw_acceptance

SLOTS = [
    {"slot": 1, "reached": 50, "accepted": 40, "conditional": 0.8, "cumulative": 0.8},
    {"slot": 2, "reached": 40, "accepted": 20, "conditional": 0.5, "cumulative": 0.4},
    {"slot": 3, "reached": 0, "accepted": 0, "conditional": None, "cumulative": 0.0},
]
ENTRIES: list[dict[str, Any]] = [{"step": 0, "tau_micro": 1.0}, {"step": 60, "tau_micro": 2.2, "slots": SLOTS}]


def test_the_picture_shows_steps_and_slots(tmp_path: Path) -> None:
    whole, one = tmp_path / "whole.png", tmp_path / "one.png"
    assert draw_acceptance(ENTRIES, whole)
    assert draw_acceptance(ENTRIES[:1], one)
    assert imread(whole).shape[:2] == imread(one).shape[:2]
    assert whole.read_bytes() != one.read_bytes()
    before = whole.read_bytes()
    assert draw_acceptance(ENTRIES, whole) and whole.read_bytes() == before


def test_without_figures_there_is_no_picture(tmp_path: Path) -> None:
    assert not draw_acceptance([], tmp_path / "none.png")
    assert not draw_acceptance([{"step": 3, "tau_micro": None}], tmp_path / "none.png")
    assert not any(tmp_path.iterdir())
