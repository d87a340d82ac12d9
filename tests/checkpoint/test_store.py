"""Checkpoints appear whole or not at all."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import store
from paceline.errors import CheckpointError


def state(value: float, size: int = 10) -> dict:
    return {
        "network": {"fc.weight": torch.full((size, size), value)},
        "optimizer": {"step": 3, "exp_avg": [torch.full((size,), value / 2)]},
        "skipped": 1,
    }


def test_reads_back_what_was_written_bit_for_bit(tmp_path: Path) -> None:
    written = state(1 / 3)
    store.write_checkpoint(tmp_path, 7, written, keep_last=2)
    read = store.read_checkpoint(tmp_path, 7)
    assert torch.equal(read["network"]["fc.weight"], written["network"]["fc.weight"])
    assert torch.equal(read["optimizer"]["exp_avg"][0], written["optimizer"]["exp_avg"][0])
    assert read["optimizer"]["step"] == 3 and read["skipped"] == 1
    assert store.newest_step(tmp_path) == 7


def test_prunes_the_oldest_and_only_after_the_new_one_is_whole(tmp_path: Path) -> None:
    for step in (100, 20, 300, 1000):
        store.write_checkpoint(tmp_path, step, state(step), keep_last=2)
    assert store.steps(tmp_path) == [300, 1000]


def test_half_written_checkpoints_do_not_count(tmp_path: Path) -> None:
    store.write_checkpoint(tmp_path, 5, state(5), keep_last=2)
    half = store.checkpoint_path(tmp_path, 9)
    half.with_name(half.name + ".part").mkdir()
    without_note = store.checkpoint_path(tmp_path, 8)
    without_note.mkdir()
    assert store.steps(tmp_path) == [5]
    store.write_checkpoint(tmp_path, 9, state(9), keep_last=2)
    assert store.steps(tmp_path) == [5, 9]


def test_a_full_disk_leaves_the_checkpoint_before_and_says_so(tmp_path: Path) -> None:
    """The kernel refuses to grow files over a limit, as a full disk does: a real error in the middle of a file."""
    store.write_checkpoint(tmp_path, 5, state(5), keep_last=1)
    script = (
        "import resource, signal, torch\n"
        "from pathlib import Path\n"
        "from paceline.checkpoint import store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"run = Path({str(tmp_path)!r})\n"
        "try:\n"
        "    store.write_checkpoint(run, 9, {'network': {'w': torch.zeros(500, 500)}}, keep_last=1)\n"
        "except store.CheckpointError as fault:\n"
        "    print(fault)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert "checkpoint not written" in done.stdout and "the checkpoint of step 5 is intact" in done.stdout
    assert done.stdout.count("\n") == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    assert torch.equal(store.read_checkpoint(tmp_path, 5)["network"]["fc.weight"], state(5)["network"]["fc.weight"])
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_damaged_checkpoint_is_one_clear_line(tmp_path: Path) -> None:
    folder = store.write_checkpoint(tmp_path, 5, state(5), keep_last=1)
    with (folder / store.WEIGHTS).open("r+b") as file:
        file.truncate((folder / store.WEIGHTS).stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"cannot be read .* remove this checkpoint to go on from the one before"):
        store.read_checkpoint(tmp_path, 5)


def test_a_checkpoint_of_another_target_is_refused(tmp_path: Path) -> None:
    note = tmp_path / "run.json"
    note.write_text(json.dumps({"target": {"configuration": "a", "weights": "b"}}))
    store.write_checkpoint(tmp_path, 5, state(5), keep_last=2)
    assert store.read_checkpoint(tmp_path, 5)
    note.write_text(json.dumps({"target": {"configuration": "a", "weights": "c"}}))
    with pytest.raises(CheckpointError, match="another target than the run's; they differ in weights;") as fault:
        store.read_checkpoint(tmp_path, 5)
    assert len(fault.value.faults) == 1
