"""Files and folders that appear whole: written aside, flushed to the disk, renamed.

A power cut or a kill leaves the old file or the new one, never a part, because of the order: the content is on the disk
before the name is, and the name is on the disk before the function returns.
"""

from __future__ import annotations

import errno
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
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(open_itself(aside, flags, 0o600 if private else 0o666), "w", encoding="utf-8") as file:
            file.write(text)


def open_itself(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file for writing, but never the one that a link of this name points to.

    In a folder that others may write, such as /tmp, anybody can put a link to a file of somebody else there.

    Args:
        path: the file.
        flags, mode: as for `os.open`.

    Returns:
        A descriptor, which child processes do not get.

    Raises:
        OSError: it is a link, or as the system says.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, f"it is a link to {path.readlink()}, remove the link", str(path)) from None
        raise


def make_folder(path: Path) -> None:
    """Make a folder and those above it, so that their names are on the disk when the function returns.

    Raises:
        OSError: as the system says.
    """
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    flush_entry(path.parent)


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """The path at which a file or folder is to be written; it takes the place of ``path`` when the block ends well.

    An error inside the block removes what was written and leaves the old one as it was. A folder takes the place of an
    old folder in two renames; the old one is removed after that.

    Raises:
        OSError: ``path`` is a link that leads nowhere, or as the system says.
    """
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
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
