"""Files and folders that appear whole: written aside, flushed to the disk, renamed.

A power cut or a kill leaves the old file or the new one, never a part, because of the order: the content is on the disk
before the name is, and the name is on the disk before the function returns.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ASIDE = ".writing"
"""Suffix of what is being written; a name that ends so may be removed when nobody writes."""


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a UTF-8 text file that appears whole; a private one can be read by its owner only.

    Raises:
        OSError: as the system says; the old file stays as it was.
    """
    with replacing(path) as aside:
        if private:
            aside.touch(mode=0o600)
        aside.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """The path at which a file or folder is to be written; it takes the place of ``path`` when the block ends well.

    An error inside the block removes what was written and leaves the old one as it was. A folder takes the place of an
    old folder in two renames; the old one is removed after that.

    Raises:
        OSError: as the system says.
    """
    aside = path.with_name(path.name + ASIDE)
    remove(aside)
    try:
        yield aside
        take_place(aside, path)
    except BaseException:
        remove(aside)
        raise


def take_place(made: Path, path: Path) -> None:
    """Give a finished file or folder the name ``path``, on the same disk; what was there before is removed.

    Raises:
        OSError: as the system says.
    """
    flush(made)
    if made.is_dir() and path.exists():
        old = replaced(path)
        remove(old)
        path.rename(old)
        made.rename(path)
        remove(old)
    else:
        made.replace(path)
    flush_entry(path.parent)


def replaced(path: Path) -> Path:
    """Where an old folder is while a new one takes its place; it may be removed when nobody writes."""
    return path.with_name(f".{path.name}.old")


def flush(path: Path) -> None:
    """Put a file, or a folder with all that is in it, on the disk.

    Raises:
        OSError: as the system says.
    """
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            flush(inner)
    flush_entry(path)


def flush_entry(path: Path) -> None:
    """Put a file, or the names in a folder (not what they name), on the disk.

    Raises:
        OSError: as the system says.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or folder if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
