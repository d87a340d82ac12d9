"""A folder that appears whole: written aside, flushed to disk, then renamed into place."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import ExportError

MARKER = "config.json"
"""What a drafter folder has; only such a folder, or an empty one, is replaced."""
NOTE = "paceline.json"
"""What paceline notes in the folders that it writes: step, target, the whole specification."""


def read_note(folder: str | Path) -> dict[str, Any]:
    """The note of a drafter folder; empty in folders that others wrote.

    Raises:
        ExportError: it is damaged.
    """
    path = Path(folder) / NOTE
    if not path.is_file():
        return {}
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(note, dict) or not isinstance(note.get("target"), dict):
            raise ValueError("it names no target")
        if not isinstance(note["target"].get("identity", {}), dict):
            raise ValueError("its target's identity is no object")
    except ValueError as error:
        raise ExportError(f"{path}: damaged ({error}); export the drafter again") from error
    return note


@contextmanager
def appearing(folder: str | Path) -> Generator[Path]:
    """A fresh folder beside `folder` to write into; on leaving without an error it takes the name `folder`.

    An older drafter folder of that name is replaced: it is moved away, the new one renamed into place, then the old one
    removed. When anything fails the old one stays as it was and the unfinished one is removed.

    Raises:
        ExportError: `folder` is a file, or a folder that holds something else than a drafter.
    """
    final = Path(folder).absolute()
    if final.exists() and not final.is_dir():
        raise ExportError(f"{final}: is a file; give a folder for the drafter")
    if final.is_dir() and any(final.iterdir()) and not (final / MARKER).is_file():
        raise ExportError(f"{final}: holds something else than a drafter (no {MARKER}); give another folder")
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".{final.name}.writing-{os.getpid()}")
    old = final.with_name(f".{final.name}.old-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        _flush(aside)
        if final.exists():
            final.rename(old)
        aside.rename(final)
        _flush_folder(final.parent)
    except BaseException:
        if old.exists() and not final.exists():
            old.rename(final)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _flush_folder(path)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
