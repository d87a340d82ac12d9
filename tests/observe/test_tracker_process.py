"""A tracker's process: gets every line, and whatever it does, the run continues and ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from observed_runs import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, StepLine, read_lines
from paceline.observe.observer import Observer, open_observer
from paceline.observe.trackers import BACKENDS

SAMPLES = random_samples(np.random.default_rng(0))


@pytest.fixture(autouse=True)
def fake_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "trackio", "observe.fake_trackers")
    monkeypatch.syspath_prepend(Path(__file__).parents[1])


def open_with(run_dir: Path, mode: str = "", **settings: Any) -> Observer:
    observe = ObserveConfig(console="quiet", diagnose_every_steps=0, trackio=True, **settings)
    return open_observer(observe, run_dir, total_steps=500, header={"mode": mode})


def seen(run_dir: Path, what: str) -> list[dict[str, Any]]:
    rows = [json.loads(row) for row in (run_dir / "seen").read_text().splitlines()]
    return [row for row in rows if row["what"] == what]


def events_of(run_dir: Path, name: str) -> list[EventLine]:
    return [
        line for line in read_lines(run_dir / "metrics.jsonl")[0] if isinstance(line, EventLine) and line.event == name
    ]


def steps_of(run_dir: Path) -> list[int]:
    return [line.step for line in read_lines(run_dir / "metrics.jsonl")[0] if isinstance(line, StepLine)]


def test_every_line_reaches_another_process(tmp_path: Path) -> None:
    observer = open_with(tmp_path)
    for step in range(1, 301):
        observer.step(report_of(step, SAMPLES))
    observer.event("checkpoint", path="x")
    observer.close("stopped")
    rows = seen(tmp_path, "line")
    assert [row["step"] for row in rows] == [*range(1, 301), 300] and rows[-1]["event"] == "checkpoint"
    assert seen(tmp_path, "close")[0]["status"] == "stopped"
    assert seen(tmp_path, "start")[0]["pid"] != os.getpid()
    assert events_of(tmp_path, "warning") == [] and "dropped_lines" not in events_of(tmp_path, "closed")[0].fields


def test_a_tracker_that_hangs_costs_one_warning(tmp_path: Path) -> None:
    observer = open_with(tmp_path, "hangs", tracker_queue_lines=4, tracker_close_limit_s=0.3)
    for step in range(1, 301):
        observer.step(report_of(step, SAMPLES))
    process = observer._trackers[0]._process
    observer.close()
    assert steps_of(tmp_path) == list(range(1, 301)) and len(seen(tmp_path, "line")) == 1
    (warning,) = events_of(tmp_path, "warning")
    assert "trackio does not keep up: its oldest lines are dropped" in warning.fields["text"]
    # The pipe holds 64 KiB of them, which nobody will read.
    assert 200 < events_of(tmp_path, "closed")[0].fields["dropped_lines"]["trackio"] < 300
    assert process.returncode is not None


def test_a_tracker_that_does_not_end_in_time_is_left_behind(tmp_path: Path) -> None:
    observer = open_with(tmp_path, "hangs", tracker_close_limit_s=0.3)
    observer.step(report_of(1, SAMPLES))
    observer.close()
    assert "did not finish within observe.tracker_close_limit_s" in events_of(tmp_path, "warning")[0].fields["text"]


def test_a_tracker_that_fails_is_dropped_with_one_warning(tmp_path: Path) -> None:
    observer = open_with(tmp_path, "fails")
    for step in range(1, 4):
        observer.step(report_of(step, SAMPLES))
    observer._trackers[0]._process.wait(60)
    for step in range(4, 9):
        observer.step(report_of(step, SAMPLES))
    observer.close()
    assert len(seen(tmp_path, "line")) == 3 and steps_of(tmp_path) == list(range(1, 9))
    (warning,) = events_of(tmp_path, "warning")
    assert "trackio failed and is dropped (BrokenPipeError: backend is gone)" in warning.fields["text"]
    # The fourth line, at which it was noticed, the warning about it, and the four steps after.
    assert events_of(tmp_path, "closed")[0].fields["dropped_lines"] == {"trackio": 6}


def test_a_tracker_whose_process_is_killed_is_dropped(tmp_path: Path) -> None:
    observer = open_with(tmp_path)
    observer.step(report_of(1, SAMPLES))
    observer._trackers[0]._process.kill()
    observer._trackers[0]._process.wait(60)
    observer.step(report_of(2, SAMPLES))
    observer.close()
    assert "its process ended with code -9" in events_of(tmp_path, "warning")[0].fields["text"]


def test_a_tracker_that_fails_when_it_closes_costs_a_warning(tmp_path: Path) -> None:
    observer = open_with(tmp_path, "fails when it closes")
    observer.step(report_of(1, SAMPLES))
    observer.close()
    assert "SystemExit: server said no" in events_of(tmp_path, "warning")[0].fields["text"]


def test_a_tracker_that_cannot_start_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrackerError, match=r"trackio cannot start .ConnectionRefusedError: no route.; correct that"):
        open_with(tmp_path, "refuses")
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]


def test_a_tracker_that_hangs_at_the_start_is_refused_in_time(tmp_path: Path) -> None:
    with pytest.raises(TrackerError, match=r"trackio did not start within 3 s"):
        open_with(tmp_path, "hangs at the start", tracker_start_limit_s=3.0)
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]


def test_the_other_tracker_hears_that_the_run_did_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "tensorboard", "observe.fake_trackers")
    (tmp_path / "metrics.jsonl").write_text("not ours\n")
    with pytest.raises(Exception, match="not a metric line"):
        open_with(tmp_path)
    assert seen(tmp_path, "close")[0]["status"] == "failed: the run did not start"
