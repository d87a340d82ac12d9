"""Writing in the background: one at a time, waiting only for the one before, errors at the next look."""

from __future__ import annotations

import errno
import pickle
import threading
from pathlib import Path

import pytest
import torch

from paceline.atomic_files import ASIDE
from paceline.checkpoint import checkpoints
from paceline.checkpoint.checkpoints import CheckpointWriter
from paceline.config import CheckpointConfig
from paceline.errors import CheckpointError


def state(value: float) -> dict:
    return {"network": {"fc.weight": torch.full((4, 4), value)}, "steps_done": int(value)}


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class Gate:
    """An export that lets itself be held up, and sees how many run at once."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.running, self.most, self.seen = 0, 0, []

    def __call__(self, step: int, network: dict) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.entered.set()
        assert self.open.wait(30)
        self.seen.append((step, float(network["fc.weight"][0, 0])))
        self.running -= 1


def test_put_returns_while_it_writes_and_the_next_waits_for_it(tmp_path: Path) -> None:
    gate = Gate()
    writer = CheckpointWriter(tmp_path, CheckpointConfig(keep_last=5), export=gate)
    writer.put(1, state(1), {"epoch": 0})
    assert gate.entered.wait(30) and checkpoints.steps(tmp_path) == [1]
    second = threading.Thread(target=writer.put, args=(2, state(2), {}))
    second.start()
    second.join(0.2)
    assert second.is_alive() and checkpoints.steps(tmp_path) == [1]
    writer.check()
    gate.open.set()
    second.join(30)
    writer.wait()
    assert gate.seen == [(1, 1.0), (2, 2.0)] and gate.most == 1
    assert checkpoints.steps(tmp_path) == [1, 2] and checkpoints.read_note(tmp_path, 1)["epoch"] == 0
    assert torch.equal(
        checkpoints.read_checkpoint(tmp_path, 2)["network"]["fc.weight"], state(2)["network"]["fc.weight"]
    )


def test_an_error_comes_at_the_next_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    writer.put(1, state(1), {})
    writer.wait()
    monkeypatch.setattr(checkpoints, "save_file", no_room)
    writer.put(2, state(2), {})
    with pytest.raises(CheckpointError, match=r"step-00000002: checkpoint not written .* step 1 is intact"):
        writer.wait()
    writer.check()
    assert checkpoints.resume_point(tmp_path) == (1, ())


def test_an_error_of_the_export_is_raised_too(tmp_path: Path) -> None:
    def broken(step: int, network: dict) -> None:
        raise CheckpointError(f"no export of step {step}")

    writer = CheckpointWriter(tmp_path, CheckpointConfig(), export=broken)
    writer.put(3, state(3), {})
    with pytest.raises(CheckpointError, match="no export of step 3"):
        writer.put(4, state(4), {})
    assert checkpoints.steps(tmp_path) == [3]


def test_the_same_step_is_not_written_again(tmp_path: Path) -> None:
    gate = Gate()
    gate.open.set()
    writer = CheckpointWriter(tmp_path, CheckpointConfig(), export=gate)
    writer.put(3, state(3), {})
    writer.put(3, state(3), {})
    writer.wait()
    assert gate.seen == [(3, 3.0)]


def test_a_pickled_writer_clears_what_a_kill_left(tmp_path: Path) -> None:
    half = checkpoints.checkpoint_path(tmp_path, 7)
    half.with_name(half.name + ASIDE).mkdir(parents=True)
    writer = pickle.loads(pickle.dumps(CheckpointWriter(tmp_path, CheckpointConfig(keep_last=1))))
    for step in (8, 9):
        writer.put(step, state(step), {})
    writer.wait()
    assert [path.name for path in half.parent.iterdir()] == ["step-00000009"]
