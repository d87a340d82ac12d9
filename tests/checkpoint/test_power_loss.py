"""A host that loses power at any moment of writing a checkpoint: only what was flushed to the disk is there later."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import checkpoints


def state(step: int) -> dict[str, Any]:
    return {"network": {"fc.weight": torch.full((30, 30), float(step))}, "skipped": step}


class Disk:
    """What of a folder survives a power cut: contents that were flushed, and names.

    A name survives from its own folder's flush on (`late`), or as soon as it is given, before the content it names, as
    file systems that order nothing may do it.
    """

    def __init__(self, root: Path, *, late: bool) -> None:
        self._root, self._late = root, late
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._folders: set[int] = set()

    def flushed(self, descriptor: int) -> None:
        """A file or a folder was flushed."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        inode = os.fstat(descriptor).st_ino
        if path.is_dir():
            self._folders.add(inode)
            self._names[inode] = self._listed(path)
        else:
            self._contents[inode] = path.read_bytes()

    def after_power_loss(self, out: Path) -> Path:
        """What the disk holds now, as a folder."""
        out.mkdir()
        if self._late:
            self._build_late(self._root.stat().st_ino, out)
        else:
            self._build_early(self._root, out)
        return out

    def _listed(self, folder: Path) -> dict[str, int]:
        found = {entry.name: entry.stat().st_ino for entry in folder.iterdir()}
        self._folders |= {entry.stat().st_ino for entry in folder.iterdir() if entry.is_dir()}
        return found

    def _build_late(self, inode: int, out: Path) -> None:
        for name, inner in self._names.get(inode, {}).items():
            if inner in self._folders:
                (out / name).mkdir()
                self._build_late(inner, out / name)
            else:
                (out / name).write_bytes(self._contents.get(inner, b""))

    def _build_early(self, folder: Path, out: Path) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                (out / entry.name).mkdir()
                self._build_early(entry, out / entry.name)
            else:
                (out / entry.name).write_bytes(self._contents.get(entry.stat().st_ino, b""))


def watched(monkeypatch: pytest.MonkeyPatch, disk: Disk, happened: Callable[[], None]) -> None:
    """Calls `happened` after every flush and around every renaming and removal."""
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        disk.flushed(descriptor)
        happened()

    def around(name: str) -> Callable[..., None]:
        real = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> None:
            happened()
            real(*arguments, **named)
            happened()

        return call

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, around(name))


@pytest.mark.parametrize("late", [True, False])
def test_a_whole_checkpoint_survives_a_power_loss(late: bool, tmp_path: Path, monkeypatch) -> None:
    """With one checkpoint kept: at every moment the disk holds the old one or the new one, whole."""
    run_dir, cuts = tmp_path / "run", []
    run_dir.mkdir()
    disk = Disk(run_dir, late=late)
    with monkeypatch.context() as patch:
        watched(patch, disk, lambda: None)
        checkpoints.write_checkpoint(run_dir, 5, state(5), keep_last=1)
    disk.after_power_loss(tmp_path / "first")
    assert checkpoints.read_checkpoint(tmp_path / "first", 5)["skipped"] == 5

    def cut() -> None:
        cuts.append(disk.after_power_loss(tmp_path / f"cut-{len(cuts)}"))

    with monkeypatch.context() as patch:
        watched(patch, disk, cut)
        checkpoints.write_checkpoint(run_dir, 9, state(9), keep_last=1)
    cut()
    steps = []
    for folder in cuts:
        step, _ = checkpoints.resume_point(folder)
        read = checkpoints.read_checkpoint(folder, step)
        assert read["skipped"] == step and torch.equal(
            read["network"]["fc.weight"], state(step)["network"]["fc.weight"]
        )
        steps.append(step)
    assert len(cuts) > 8 and steps == sorted(steps) and {*steps} == {5, 9}
