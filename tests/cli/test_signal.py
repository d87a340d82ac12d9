"""A run that trains is asked for a checkpoint, and to stop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from paceline.checkpoint import checkpoints
from paceline.cli import main

MakeRun = Callable[..., Path]


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
        assert main(["signal", str(run_dir), "stop"]) == 0
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert checkpoints.steps(run_dir)[0] == first < checkpoints.newest_step(run_dir) < 2900
    assert len(checkpoints.steps(run_dir)) == 2


def test_a_run_that_nobody_trains_is_one_line(make_run: MakeRun, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert main(["signal", str(tmp_path / "none"), "stop"]) == 1
    assert "no run here" in capfd.readouterr().err
    settings = make_run(train={"max_steps": 2})
    assert main(["train", str(settings)]) == 0
    capfd.readouterr()
    assert main(["signal", yaml.safe_load(settings.read_text())["run_dir"], "checkpoint"]) == 1
    assert "nobody trains it on this machine; see `paceline status" in capfd.readouterr().err
