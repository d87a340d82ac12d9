"""Two trainers of one run: the second is told, and a killed first one leaves nothing in the way."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.checkpoint.run_lock import WITHOUT_LOCKS, hold_run, trainer_of
from paceline.errors import RunDirectoryError

HOLDER = """
import sys, time
from pathlib import Path
from paceline.checkpoint.run_lock import hold_run
with hold_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(run_dir: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_second_trainer_is_told_who_holds_the_run(tmp_path: Path) -> None:
    other = holder(tmp_path / "run")
    try:
        told = pytest.raises(RunDirectoryError, match=f"another process \\(pid {other.pid}\\) is training it")
        with told, hold_run(tmp_path / "run"):
            pass
        with hold_run(tmp_path / "other"):
            pass
    finally:
        ended(other)


def test_a_run_is_held_under_all_its_names(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other name").symlink_to(tmp_path / "run")
    other = holder(tmp_path / "run")
    try:
        for name in (tmp_path / "other name", tmp_path / "run" / ".." / "run"):
            told = pytest.raises(RunDirectoryError, match=f"another process \\(pid {other.pid}\\) is training it")
            with told, hold_run(name):
                pass
    finally:
        ended(other)


def test_the_lock_is_inside_where_nothing_fits_beside(tmp_path: Path) -> None:
    """As with a mounted run directory whose parent is read-only; here the name of the file beside is too long."""
    run = tmp_path / ("r" * 250)
    with pytest.raises(RunDirectoryError, match="cannot be made or locked"), hold_run(run):
        pass
    run.mkdir()
    other = holder(run)
    try:
        with pytest.raises(RunDirectoryError, match=r"another process .* is training it"), hold_run(run):
            pass
    finally:
        ended(other)
    with hold_run(run):
        pass
    assert [path.name for path in run.iterdir()] == [".training"]


def test_a_killed_trainer_holds_nothing(tmp_path: Path) -> None:
    other = holder(tmp_path / "run")
    ended(other)
    with hold_run(tmp_path / "run"):
        assert trainer_of(tmp_path / "run") == os.getpid()


def test_an_error_frees_the_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hold_run(tmp_path / "run"):
        raise ZeroDivisionError
    with hold_run(tmp_path / "run"):
        pass


@pytest.mark.parametrize("code", WITHOUT_LOCKS)
def test_a_disk_without_locks_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As the store's lock does, see tests/data/test_prepare.py."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold_run(tmp_path / "run"):
        assert (tmp_path / ".run.training").is_file()


def test_the_command_trains_no_run_that_is_being_trained(
    tmp_path: Path, demo_assets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.cli import main

    settings = tmp_path / "run.yaml"
    settings.write_text(
        f"run_dir: {tmp_path / 'run'}\n"
        f"target: {{path: {demo_assets / 'target'}, num_taps: 3}}\n"
        f"data: {{train: [{demo_assets / 'chats.jsonl'}]}}\n",
        encoding="utf-8",
    )
    with hold_run(tmp_path / "run"):
        assert main(["train", str(settings)]) == 1
    assert "is training it" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
