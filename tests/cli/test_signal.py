"""A run that trains is asked for a checkpoint, and to stop."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from paceline.checkpoint import checkpoints
from paceline.cli import main

MakeRun = Callable[..., Path]


@pytest.fixture(autouse=True)
def terminals_can_close() -> Iterator[None]:
    """Runs inherit what happens at SIGHUP; where the tests were started with nohup, it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def until(reached: Callable[[], bool], process: subprocess.Popen, log: Path) -> None:
    """Waits, as long as the run trains."""
    deadline = time.monotonic() + 120
    while not reached():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def test_a_checkpoint_and_a_stop_are_asked_for(make_run: MakeRun, tmp_path: Path, capfd) -> None:
    settings = make_run(
        train={"epochs": 500, "max_steps": 3000}, checkpoint={"every_steps": 2900}, observe={"console": "plain"}
    )
    run_dir, log = Path(yaml.safe_load(settings.read_text())["run_dir"]), tmp_path / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        words = [sys.executable, "-m", "paceline", "train", str(settings)]
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        until(lambda: "step 1/" in log.read_text(), process, log)
        assert main(["signal", str(run_dir), "checkpoint"]) == 0
        assert f"asked process {process.pid}: checkpoint" in capfd.readouterr().out
        until(lambda: checkpoints.newest_step(run_dir) > 0, process, log)
        first = checkpoints.newest_step(run_dir)
        process.send_signal(signal.SIGHUP)  # it writes to a file, not to a terminal
        until(lambda: checkpoints.newest_step(run_dir) > first, process, log)
        assert main(["signal", str(run_dir), "stop"]) == 0
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert checkpoints.steps(run_dir)[0] == first < checkpoints.newest_step(run_dir) < 2900
    assert len(checkpoints.steps(run_dir)) == 3


def test_a_run_that_nobody_trains_is_one_line(make_run: MakeRun, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert main(["signal", str(tmp_path / "none"), "stop"]) == 1
    assert "no run here" in capfd.readouterr().err
    settings = make_run(train={"max_steps": 2})
    assert main(["train", str(settings)]) == 0
    capfd.readouterr()
    assert main(["signal", yaml.safe_load(settings.read_text())["run_dir"], "checkpoint"]) == 1
    assert "nobody trains it on this machine; see `paceline status" in capfd.readouterr().err
    assert main(["signal", yaml.safe_load(settings.read_text())["run_dir"], "evaluate"]) == 2
    assert "evaluate.device is unset, so nothing decodes beside this run" in capfd.readouterr().err


def test_a_closed_terminal_stops_the_run_in_order(make_run: MakeRun, tmp_path: Path) -> None:
    """What is trained is kept, though nothing can be written to that terminal any more."""
    settings = make_run(
        train={"epochs": 500, "max_steps": 3000},
        checkpoint={"every_steps": 2900},
        observe={"console": "plain", "plain_every_s": 0},
        flow={"mode": "pipeline"},
    )
    run_dir = Path(yaml.safe_load(settings.read_text())["run_dir"])
    words = [sys.executable, "-m", "paceline", "train", str(settings)]
    child, terminal = pty.fork()
    if not child:
        os.execve(sys.executable, words, {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
    shown = b""
    try:
        while b"step 2/" not in shown:
            shown += os.read(terminal, 65536)
        os.close(terminal)  # the kernel sends SIGHUP to the session
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    last = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["event"] == "closed" and last["fields"]["status"] == "stopped"
    assert checkpoints.newest_step(run_dir) == last["step"] >= 2
