"""Where a run is, from its files: training, finished, killed, failed; quick on long runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from observed_runs import make_run_directory
from paceline.checkpoint.run_lock import hold_run, trainer_of
from paceline.cli import main, status
from paceline.cli.status import read_status
from paceline.observe.metrics_file import newest_lines, read_lines


def test_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run_directory(tmp_path / "run", skipped=(39,))
    evaluation = {"evaluations": [{"step": 40, "tau_micro": 2.25}]}
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation))
    assert main(["status", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{run_dir}: finished\n  step 40 of 40 · epoch 1 of 6 · last line ")
    assert "τ 2.50 · held-out τ 2.25 · " in text and "checkpoint of step 0\n" in text
    assert "warning: 1 step was skipped" in text


def test_a_run_that_trains_is_told_from_one_that_was_killed(tmp_path: Path) -> None:
    run_dir = make_run_directory(tmp_path / "run", steps=25)
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:21]))
    assert trainer_of(run_dir) is None
    killed = read_status(run_dir)
    assert (killed.state, killed.pid, killed.step, killed.next_checkpoint) == ("not trained", None, 20, None)
    with hold_run(run_dir):
        training = read_status(run_dir)
    assert (training.state, training.pid, training.step) == ("training", os.getpid(), 20)
    assert training.next_checkpoint == 25 and training.time_left_s is not None
    assert read_status(run_dir).state == "not trained"


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    run_dir = make_run_directory(tmp_path / "run", status="failed: target 0: out of memory")
    assert read_status(run_dir).state == "failed: target 0: out of memory"


def test_a_run_before_its_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run_directory(tmp_path / "run", steps=1)
    (run_dir / "metrics.jsonl").unlink()
    assert main(["status", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["loss"], found["state"]) == (0, None, "not trained")


def test_watching_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run_directory(tmp_path / "run", steps=2)
    monkeypatch.setattr(status.time, "sleep", lambda seconds: held.__exit__(None, None, None))
    for words in ([], ["--json"]):
        held = hold_run(run_dir)
        held.__enter__()
        assert main(["status", str(run_dir), "--watch", *words]) == 0
        text = capsys.readouterr().out
        if words:
            assert [json.loads(row)["state"] for row in text.splitlines()] == ["training", "finished"]
        else:
            assert f"{run_dir}: fi" in text  # cut at the width of the terminal


def test_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: not a run directory; give the directory of a run, for example runs/first\n"
    )


def test_the_end_of_a_long_file_is_read_with_its_header(tmp_path: Path) -> None:
    path = make_run_directory(tmp_path / "run", steps=60) / "metrics.jsonl"
    every = read_lines(path)[0]
    assert newest_lines(path) == every
    some = newest_lines(path, num_bytes=20_000)
    assert some[0] == every[0] and 3 < len(some) < 20 and some[1:] == every[1 - len(some) :]
    with path.open("a") as file:
        file.write('{"kind":"step","st')
    assert newest_lines(path) == every
    path.write_bytes(b"")
    assert newest_lines(path) == []
