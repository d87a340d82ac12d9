"""One process at a time trains a run."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import filelock

from paceline.atomic_files import make_folder, open_itself
from paceline.errors import RunDirectoryError
from paceline.text import first_line

WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What disks answer that lock no files."""


@contextmanager
def hold_run(run_dir: Path) -> Generator[None]:
    """Hold a run while it is trained: the file `.NAME.training` beside it, freed by the system with the process.

    Workers do not inherit it, so a run whose trainer was killed can be started again at once. Links are followed: a run
    is held under all its names. Where nothing can be made beside it, as with a mounted directory, the file is inside.
    Disks that lock no files are trusted. The file stays, for it may not be removed while others open it.

    Raises:
        RunDirectoryError: another process trains this run, or no file can be made for the lock.
    """
    place = run_dir.resolve()
    beside, inside = place.parent / f".{place.name}.training", place / ".training"
    try:
        lock = _acquired(beside, run_dir)
    except RunDirectoryError:
        raise
    except OSError as error:
        if not place.is_dir():
            raise RunDirectoryError(
                f"{beside}: cannot be made or locked ({first_line(error)}); give another run_dir"
            ) from error
        try:
            lock = _acquired(inside, run_dir)
        except RunDirectoryError:
            raise
        except OSError as inner:
            raise RunDirectoryError(
                f"{inside}: cannot be made or locked ({first_line(inner)}); give another run_dir"
            ) from inner
    try:
        yield
    finally:
        lock.release()


def _acquired(path: Path, run_dir: Path) -> filelock.BaseFileLock:
    make_folder(path.parent)
    os.close(open_itself(path, os.O_WRONLY | os.O_CREAT, 0o644))
    lock = filelock.FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise RunDirectoryError(
            f"{run_dir}: another process (pid {_holder(path) or 'unknown'}) is training it; wait for that one, "
            "stop it with Ctrl-C, or give another run_dir"
        ) from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return lock
    with os.fdopen(open_itself(path, os.O_WRONLY | os.O_TRUNC), "w", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")
    return lock


def trainer_of(run_dir: Path) -> int | None:
    """Process id of the trainer that holds a run, 0 where it is not known; None where nobody trains it."""
    place = run_dir.resolve()
    for path in (place.parent / f".{place.name}.training", place / ".training"):
        lock = filelock.FileLock(path, thread_local=False, fallback_to_soft=False)
        try:
            if path.is_file():
                lock.acquire(blocking=False)
                lock.release()
        except filelock.Timeout:
            return _holder(path)
        except OSError:  # a disk without locks, or a lock that others may not open
            continue
    return None


def _holder(path: Path) -> int:
    found = re.search(r"\d+", path.read_text(encoding="ascii", errors="replace"))
    return int(found[0]) if found else 0
