from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from observed_runs import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, read_lines
from paceline.observe.observer import open_observer
from paceline.types import Ratio

SAMPLES = random_samples(np.random.default_rng(0))


def recorder(tmp_path) -> list[str]:
    """A command that appends its input to a file."""
    program = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
    return [sys.executable, "-c", program, str(tmp_path / "received")]


def received(tmp_path) -> list[dict]:
    path = tmp_path / "received"
    return [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []


def open_with(run_dir, first_step=0, **settings):
    settings = ObserveConfig(console="quiet", diagnose_every_steps=0, **settings)
    return open_observer(settings, run_dir, total_steps=500, header={}, first_step=first_step)


def warnings_of(run_dir) -> list[str]:
    events = [line for line in read_lines(run_dir / "metrics.jsonl")[0] if isinstance(line, EventLine)]
    return [event.fields["text"] for event in events if event.event == "warning"]


def test_jumps_skipped_steps_and_the_end_are_alerts(tmp_path):
    observer = open_with(tmp_path / "run", alert_command=recorder(tmp_path))
    rng = np.random.default_rng(0)
    for step in range(1, 101):
        loss = 3.0 + 0.01 * rng.normal() + (2.0 if step in (70, 72) else 0.0)
        observer.step(report_of(step, SAMPLES, loss=Ratio(loss, 1.0), skipped=step in (80, 81)))
    observer.close("finished")
    # Each alert is a process of its own; under load they end in another order.
    alerts = sorted(received(tmp_path), key=lambda alert: alert["step"])
    assert [(alert["kind"], alert["step"]) for alert in alerts] == [
        ("loss-jump", 70),
        ("not-finite", 80),
        ("ended", 100),
    ]
    assert alerts[0]["text"].startswith("paceline run: loss jumped from about 3.0") and " to 4.97" in alerts[0]["text"]
    assert alerts[2]["text"] == "paceline run: finished at step 100"
    assert alerts[2]["run_dir"] == str(tmp_path / "run")


def test_a_failure_is_one_alert_with_its_reason(tmp_path):
    observer = open_with(tmp_path / "run", alert_command=recorder(tmp_path))
    observer.step(report_of(1, SAMPLES))
    observer.event("failure", error="target 0: batch 17: out of memory")
    observer.close("failed")
    assert [alert["text"] for alert in received(tmp_path)] == [
        "paceline run: failed: target 0: batch 17: out of memory"
    ]
    observer = open_with(tmp_path / "other", alert_command=recorder(tmp_path))
    observer.close("failed")
    assert received(tmp_path)[-1]["text"] == "paceline other: failed at step 0"


def test_an_alert_that_cannot_be_sent_costs_a_warning(tmp_path):
    observer = open_with(tmp_path / "run", alert_command=[sys.executable, "-c", "raise SystemExit(3)"])
    observer.step(report_of(1, SAMPLES))
    observer.close("finished")
    (warning,) = warnings_of(tmp_path / "run")
    assert "exit code 3" in warning and "later alerts are still sent" in warning


def test_a_command_that_hangs_is_ended_and_holds_up_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.observe.alerts.COMMAND_LIMIT_S", 0.2)
    program = "import signal, sys; sys.stdin.read(); signal.pause()"
    observer = open_with(tmp_path / "run", alert_command=[sys.executable, "-c", program])
    for step in range(1, 61):
        observer.step(report_of(step, SAMPLES, skipped=step in (1, 30)))
    observer.close("finished")
    (warning,) = warnings_of(tmp_path / "run")
    assert "it was ended after 0.2 s" in warning


def test_one_failed_command_costs_that_alert_only(tmp_path):
    """The command fails the first two times."""
    program = (
        "import sys, pathlib; count = pathlib.Path(sys.argv[1]); n = len(count.read_text()) if count.exists() else 0; "
        "count.write_text('x' * (n + 1)); n < 2 and sys.exit(1); "
        "open(sys.argv[2], 'a').write(sys.stdin.read() + chr(10))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "count"), str(tmp_path / "received")]
    observer = open_with(tmp_path / "run", alert_command=command)
    alerts = observer._alerts
    for step in range(1, 91):
        observer.step(report_of(step, SAMPLES, skipped=step in (1, 30, 60)))
        for process, _ in alerts._running:  # one after the other: they count in a file
            process.wait(60)
    observer.close("finished")
    assert [(alert["kind"], alert["step"]) for alert in received(tmp_path)] == [("not-finite", 60), ("ended", 90)]
    assert len(warnings_of(tmp_path / "run")) == 1


def test_the_quiet_time_after_an_alert_is_counted_in_lines(tmp_path):
    observer = open_with(tmp_path / "run", alert_command=recorder(tmp_path), every_steps=10)
    for step in range(1, 501):
        observer.step(report_of(step, SAMPLES, skipped=step in (15, 95, 395)))
    observer.close("finished")
    # Lines 2, 10 and 40: the second is within twenty lines of the first, the third is not.
    assert [(alert["kind"], alert["step"]) for alert in received(tmp_path)][:-1] == [
        ("not-finite", 20),
        ("not-finite", 400),
    ]


def test_a_resumed_run_that_fails_at_once_says_its_step(tmp_path):
    observer = open_with(tmp_path / "run", first_step=40, alert_command=recorder(tmp_path))
    observer.close("stopped")
    assert [(a["step"], a["text"]) for a in received(tmp_path)] == [(40, "paceline run: stopped at step 40")]


def test_a_command_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(TrackerError, match=r"observe.alert_command: no-such-program: no such program"):
        open_with(tmp_path / "run", alert_command=["no-such-program", "x"])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
