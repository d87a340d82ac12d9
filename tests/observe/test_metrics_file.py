from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import RunDirectoryError
from paceline.observe.metrics_file import EventLine, HeaderLine, MetricsFile, StepLine, read_lines


def step_line(step: int, **values: float) -> StepLine:
    return StepLine(step, 1.0, 1, 0, step - 1, [step], values, {})


def write_steps(path, steps, first_step=0):
    file = MetricsFile(path, first_step)
    for step in steps:
        file.append(step_line(step, loss=float(step)))
    file.close()


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    header = HeaderLine(0, 1.0, 1, 9, {"lengths": np.array([1, 2]), "size": np.int64(3), "at": tmp_path})
    file.append(header)
    file.append(step_line(1, loss=float("nan"), tau=np.float64(1.5)))
    file.append(EventLine(1, 2.0, "checkpoint", {"path": "x"}))
    file.close()
    lines, notes = read_lines(path)
    assert notes == []
    assert lines[0] == HeaderLine(0, 1.0, 1, 9, {"lengths": [1, 2], "size": 3, "at": str(tmp_path)})
    assert lines[1] == step_line(1, loss=None, tau=1.5)
    assert lines[2] == EventLine(1, 2.0, "checkpoint", {"path": "x"})


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_half_written_last_line_is_cut_off_at_the_next_start(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 6))
    path.write_bytes(path.read_bytes()[:-cut])
    lines, notes = read_lines(path)
    assert [line.step for line in lines] == [1, 2, 3, 4]
    assert len(notes) == 1 and "half written" in notes[0]
    write_steps(path, [5, 6], first_step=4)
    lines, notes = read_lines(path)
    assert [line.step for line in lines] == [1, 2, 3, 4, 5, 6] and notes == []


@pytest.mark.parametrize("first_step", [0, 1, 3, 5, 9])
def test_resuming_cuts_exactly_the_lines_after_the_checkpoint(tmp_path, first_step):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 6))
    file = MetricsFile(path, first_step)
    file.close()
    lines = read_lines(path)[0] if path.stat().st_size else []
    assert [line.step for line in lines] == [step for step in range(1, 6) if step <= first_step]
    newest = file.last_step_line.step if file.last_step_line else 0
    assert newest == min(first_step, 5)


def test_a_foreign_file_is_not_touched(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1, "acc": 0.5}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl:1: not a metric line"):
        MetricsFile(path, 0)
    assert path.read_text() == '{"epoch": 1, "acc": 0.5}\n'
    with pytest.raises(RunDirectoryError, match="not a metrics file of paceline"):
        read_lines(path)


def test_lines_that_cannot_be_read_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(rows[0] + rows[1][:30] + b"\n" + b"\xff\xfe\n" + rows[2])
    lines, notes = read_lines(path)
    assert [line.step for line in lines] == [1, 3]
    assert notes == ["metrics.jsonl: 2 of 4 lines cannot be read and are left out (line 2, 3)"]


def test_a_full_disk_is_one_clear_line(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), file._descriptor)
    with pytest.raises(RunDirectoryError, match=r"cannot be written .No space left on device.; free space"):
        file.append(step_line(1))


def test_every_line_survives_sigkill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    program = f"""
import os, signal
from pathlib import Path
from paceline.observe.metrics_file import MetricsFile, StepLine
file = MetricsFile(Path({str(path)!r}), 0)
for step in range(1, 8):
    file.append(StepLine(step, 1.0, 1, 0, 0, [], {{"loss": 1.0}}, {{}}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [line.step for line in read_lines(path)[0]] == list(range(1, 8))


def test_a_foreign_file_without_a_line_end_is_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"my precious notes, one line")
    with pytest.raises(RunDirectoryError, match="its end is not a metric line"):
        MetricsFile(path, 0)
    assert path.read_bytes() == b"my precious notes, one line"
