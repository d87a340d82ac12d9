from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from observed_runs import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.observe.observer import open_observer
from paceline.text import duration, percent, short

SAMPLES = random_samples(np.random.default_rng(0))


def watch(tmp_path, settings: ObserveConfig, *, terminal: bool, steps: int = 20, seconds: float = 1.0) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100, soft_wrap=True, highlight=False)
    observer = open_observer(settings, tmp_path, total_steps=steps, header={}, console=console)
    for step in range(1, steps + 1):
        observer.step(report_of(step, SAMPLES, seconds=seconds))
    observer.note("checkpoint [20] written")
    observer.warn("loss jumped")
    observer.close()
    return screen.getvalue()


def test_plain_lines_come_first_last_and_every_ten_seconds(tmp_path):
    lines = watch(tmp_path, ObserveConfig(), terminal=False).splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step ")]
    assert steps == [1, 11, 20]
    assert lines[-3:] == ["checkpoint [20] written", "warning: loss jumped", "training finished"]
    for phrase in ("loss ", "τ 2.50", "real tokens/s", "draft positions/s", "% real", "target 80 % busy, 20 % blocked"):
        assert phrase in lines[0], phrase


def test_plain_shows_the_last_step_of_a_run_that_was_stopped(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, width=200, soft_wrap=True)
    observer = open_observer(ObserveConfig(), tmp_path, total_steps=50, header={}, console=console)
    for step in range(1, 4):
        observer.step(report_of(step, SAMPLES, seconds=0.1))
    observer.close("stopped")
    lines = screen.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["1/50", "3/50"] and lines[2] == "training stopped"


def test_a_terminal_gets_a_bar_with_time_left_and_stage_shares(tmp_path):
    text = watch(tmp_path, ObserveConfig(), terminal=True)
    for phrase in ("20/20", "100 %", "0.0 s left", "τ 2.50", "drafter 40 % busy", "checkpoint [20] written"):
        assert phrase in text, phrase


def test_quiet_shows_warnings_only(tmp_path):
    assert watch(tmp_path, ObserveConfig(console="quiet"), terminal=True).count("\n") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1, "1"), (999.6, "1.00k"), (12345.6, "12.3k"), (1_000_000, "1M"), (0.5, "0.5"), (0.0006, "6.0e-04"),
        (0.00123, "0.0012"), (float("nan"), "–"), (None, "–"), (-2500, "-2.50k"), (99.96, "100"), (2.5e12, "2.50T"),
    ],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert short(value) == text


def test_shares_and_durations():
    assert [percent(x) for x in (0, 0.004, 0.071, 0.5, 1.0, float("nan"))] == [
        "0 %",
        "0.4 %",
        "7.1 %",
        "50 %",
        "100 %",
        "–",
    ]
    times = (0.04, 9.96, 59.6, 3725, 400_000, float("inf"))
    assert [duration(x) for x in times] == ["0.0 s", "10.0 s", "1:00", "1:02:05", "4 d 15 h", "–"]
