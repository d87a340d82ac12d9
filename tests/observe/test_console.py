from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from observed_runs import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.observe.observer import open_observer
from paceline.terminal import PlainConsole
from paceline.types import Ratio

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


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_a_failure_is_left_to_who_started_the_run(kind, tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    observer = open_observer(ObserveConfig(console=kind), tmp_path, total_steps=50, header={}, console=console)
    observer.step(report_of(1, SAMPLES, seconds=0.1))
    observer.close("failed: stage target 0: out of memory")
    assert "out of memory" not in screen.getvalue() and "failed" not in screen.getvalue()


def test_quiet_shows_warnings_only(tmp_path):
    assert watch(tmp_path, ObserveConfig(console="quiet"), terminal=True).count("\n") == 1


def test_a_line_begins_with_place_time_loss_and_both_taus(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, width=400, soft_wrap=True, highlight=False)
    settings = ObserveConfig(console="plain", plain_every_s=0.0)
    observer = open_observer(settings, tmp_path, total_steps=10, header={}, console=console)
    for step in range(1, 5):
        if step == 3:
            observer.gauge("decode/tau", 2.25)
        report = report_of(step, SAMPLES)
        if step == 2:
            report = replace(report, ratios=report.ratios | {"validation/acceptance/streak": Ratio(10, 10)})
        observer.step(report)
    observer.close()
    lines = [line.split(" · ") for line in screen.getvalue().splitlines() if line.startswith("step")]
    starts = [" ".join(part.split()[:1]) for part in lines[3][:6]]
    assert starts == ["step", "epoch", "3.0", "loss", "τ", "held-out"] and lines[3][2] == "3.0 s left"
    # Validation batches until something was decoded; the newest one is shown until there is another.
    assert [line[5] if "held-out" in line[5] else "" for line in lines] == [
        "", "held-out τ 2.00", "held-out τ 2.25", "held-out τ 2.25",
    ]  # fmt: skip
    assert lines[3][6].endswith("real tokens/s")


def test_text_of_the_run_is_not_markup(tmp_path):
    screen = io.StringIO()
    observer = open_observer(
        ObserveConfig(console="plain"), tmp_path, total_steps=1, header={}, console=PlainConsole(stderr=True)
    )
    observer._view._console.file = screen
    observer.note("[bold]:x:[/x] \x1b[31m")
    observer.warn("[/b] :warning:")
    observer.close("stopped [/x]")
    text = screen.getvalue()
    assert "[bold]:x:[/x] \\x1b[31m" in text and "warning: [/b] :warning:" in text and "stopped [/x]" in text
