from __future__ import annotations

import http.server
import json
import sys
import threading

import numpy as np
import pytest

from observe.step_reports import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, read_lines
from paceline.observe.observer import open_observer
from paceline.types import Ratio

SAMPLES = random_samples(np.random.default_rng(0))


def recorder(tmp_path) -> list[str]:
    """A command that appends what it hears to a file."""
    program = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
    return [sys.executable, "-c", program, str(tmp_path / "heard")]


def heard(tmp_path) -> list[dict]:
    path = tmp_path / "heard"
    return [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []


def open_with(run_dir, first_step=0, **settings):
    settings = ObserveConfig(console="quiet", diagnose_every_steps=0, **settings)
    return open_observer(settings, run_dir, total_steps=500, header={}, first_step=first_step)


def warnings_of(run_dir) -> list[str]:
    events = [line for line in read_lines(run_dir / "metrics.jsonl")[0] if isinstance(line, EventLine)]
    return [event.fields["text"] for event in events if event.event == "warning"]


def test_a_command_hears_of_jumps_skipped_steps_and_the_end_once_each(tmp_path):
    observer = open_with(tmp_path / "run", alert_command=recorder(tmp_path))
    rng = np.random.default_rng(0)
    for step in range(1, 101):
        loss = 3.0 + 0.01 * rng.normal() + (2.0 if step in (70, 72) else 0.0)
        observer.step(report_of(step, SAMPLES, loss=Ratio(loss, 1.0), skipped=step in (80, 81)))
    observer.close("finished")
    alerts = heard(tmp_path)
    assert [(alert["kind"], alert["step"]) for alert in alerts] == [
        ("loss-jump", 70),
        ("not-finite", 80),
        ("ended", 100),
    ]
    assert alerts[0]["text"].startswith("paceline run: loss jumped from about 3.0") and " to 4.97" in alerts[0]["text"]
    assert alerts[2]["text"] == "paceline run: finished at step 100"
    assert alerts[2]["run_dir"] == str(tmp_path / "run")


def test_a_command_hears_of_a_failure_once_with_its_reason(tmp_path):
    observer = open_with(tmp_path / "run", alert_command=recorder(tmp_path))
    observer.step(report_of(1, SAMPLES))
    observer.event("failure", error="target 0: batch 17: out of memory")
    observer.close("failed")
    assert [alert["text"] for alert in heard(tmp_path)] == ["paceline run: failed: target 0: batch 17: out of memory"]
    observer = open_with(tmp_path / "other", alert_command=recorder(tmp_path))
    observer.close("failed")
    assert heard(tmp_path)[-1]["text"] == "paceline other: failed at step 0"


def test_a_command_hears_of_a_stall_once(tmp_path):
    observer = open_with(tmp_path / "run", alert_command=recorder(tmp_path), alert_after_s=0.05)
    observer.step(report_of(1, SAMPLES))
    pause = threading.Event()
    for _ in range(200):
        if heard(tmp_path):
            break
        pause.wait(0.05)
    pause.wait(0.3)
    observer.close("stopped")
    kinds = [alert["kind"] for alert in heard(tmp_path)]
    assert kinds == ["stall", "ended"]


def test_a_webhook_gets_the_same_object(tmp_path):
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        observer = open_with(tmp_path / "run", alert_webhook=f"http://127.0.0.1:{server.server_port}/hook")
        observer.step(report_of(1, SAMPLES))
        observer.close("finished")
        server.shutdown()
        thread.join()
    assert [body["text"] for body in bodies] == ["paceline run: finished at step 1"]


@pytest.mark.parametrize(
    ("settings", "phrase"),
    [
        ({"alert_webhook": "http://127.0.0.1:9/hook"}, "alert webhook 127.0.0.1:9"),
        ({"alert_command": [sys.executable, "-c", "raise SystemExit(3)"]}, "returned non-zero exit status 3"),
    ],
)
def test_an_alert_that_cannot_be_delivered_costs_a_warning(tmp_path, settings, phrase):
    observer = open_with(tmp_path / "run", **settings)
    observer.step(report_of(1, SAMPLES))
    observer.close("finished")
    (warning,) = warnings_of(tmp_path / "run")
    assert phrase in warning and "later alerts are still sent" in warning


def test_one_failed_delivery_costs_that_alert_only(tmp_path):
    """The command fails until a file is there; two deliveries fail, one warning is told, the later ones arrive."""
    program = (
        "import sys, pathlib; pathlib.Path(sys.argv[1]).stat(); "
        "open(sys.argv[2], 'a').write(sys.stdin.read() + chr(10))"
    )
    gate = tmp_path / "gate"
    command = [sys.executable, "-c", program, str(gate), str(tmp_path / "heard")]
    observer = open_with(tmp_path / "run", alert_command=command)
    for step in range(1, 61):
        observer.step(report_of(step, SAMPLES, skipped=step in (1, 30)))
    pause = threading.Event()
    mirror = observer._mirrors[0]
    for _ in range(400):
        if mirror._sink.failed_deliveries == 2:
            break
        pause.wait(0.05)
    gate.touch()
    observer.step(report_of(61, SAMPLES, skipped=True))
    observer.close("finished")
    assert [(alert["kind"], alert["step"]) for alert in heard(tmp_path)] == [("not-finite", 61), ("ended", 61)]
    assert len(warnings_of(tmp_path / "run")) == 1 and not mirror.failed


def test_a_dead_webhook_does_not_keep_the_command_from_hearing(tmp_path):
    observer = open_with(tmp_path / "run", alert_command=recorder(tmp_path), alert_webhook="http://127.0.0.1:9/hook")
    observer.step(report_of(1, SAMPLES))
    observer.close("finished")
    assert [alert["kind"] for alert in heard(tmp_path)] == ["ended"] and len(warnings_of(tmp_path / "run")) == 1


def test_the_quiet_time_after_an_alert_is_counted_in_lines(tmp_path):
    observer = open_with(tmp_path / "run", alert_command=recorder(tmp_path), every_steps=10)
    for step in range(1, 501):
        observer.step(report_of(step, SAMPLES, skipped=step in (15, 95, 395)))
    observer.close("finished")
    # Lines 2, 10 and 40: the second is within twenty lines of the first, the third is not.
    assert [(alert["kind"], alert["step"]) for alert in heard(tmp_path)][:-1] == [
        ("not-finite", 20),
        ("not-finite", 400),
    ]


def test_a_resumed_run_that_fails_at_once_says_where_it_stood(tmp_path):
    observer = open_with(tmp_path / "run", first_step=40, alert_command=recorder(tmp_path))
    observer.close("stopped")
    assert [(a["step"], a["text"]) for a in heard(tmp_path)] == [(40, "paceline run: stopped at step 40")]


def test_steps_between_lines_are_no_stall(tmp_path):
    observer = open_with(tmp_path / "run", alert_command=recorder(tmp_path), alert_after_s=1.0, every_steps=1000)
    pause = threading.Event()
    for step in range(1, 31):
        observer.step(report_of(step, SAMPLES))
        pause.wait(0.1)
    observer.close("stopped")
    assert [(alert["kind"], alert["step"]) for alert in heard(tmp_path)] == [("ended", 30)]


def test_a_warning_of_another_mirror_is_no_step(tmp_path):
    """A stall is told once, however much is said meanwhile."""
    observer = open_with(tmp_path / "run", alert_command=recorder(tmp_path), alert_after_s=0.3)
    observer.step(report_of(1, SAMPLES))
    pause = threading.Event()
    for _ in range(20):
        pause.wait(0.1)
        observer.note("still here")
    observer.close("stopped")
    assert [alert["kind"] for alert in heard(tmp_path)] == ["stall", "ended"]


@pytest.mark.parametrize(
    ("settings", "phrase"),
    [
        ({"alert_command": ["no-such-program", "x"]}, "observe.alert_command: no-such-program: no such program"),
        ({"alert_webhook": "hooks.example.org/x"}, "observe.alert_webhook: hooks.example.org/x: not an address"),
    ],
)
def test_alerts_that_can_never_work_are_refused_before_any_work(tmp_path, settings, phrase):
    with pytest.raises(TrackerError, match=phrase):
        open_with(tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
