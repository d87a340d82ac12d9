"""One process at a time trains a run."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import RunDirectoryError

_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def hold_run(run_dir: Path) -> Generator[None]:
    """Hold a run while it is trained: the file `.NAME.training` beside it, let go of by the system with the process.

    Workers do not inherit it, so a run whose trainer was killed can be started again at once. Links are followed: a run
    is held under all its names. Where nothing can be made beside it, as with a mounted directory, it is held itself.
    Disks that know no locks are trusted.

    Raises:
        RunDirectoryError: another process trains this run, or it is not there and nothing can be made beside it.
    """
    place = run_dir.resolve()
    path = place.parent / f".{place.name}.training"
    handle = _held(path, place, run_dir)
    try:
        yield
    finally:
        # Removed while it is held: whoever opened this file finds that it is gone, and makes the next one.
        if stat.S_ISREG(os.fstat(handle).st_mode):
            path.unlink(missing_ok=True)
        os.close(handle)


def trainer_of(run_dir: Path) -> int | None:
    """Process id of the trainer that holds a run, 0 where it is not known; None where nobody trains it."""
    place = run_dir.resolve()
    path = place.parent / f".{place.name}.training"
    try:
        handle = os.open(path if path.is_file() else place, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        known = os.pread(handle, 32, 0).decode(errors="replace") if stat.S_ISREG(os.fstat(handle).st_mode) else ""
        return int(known) if known.isdigit() else 0
    except OSError:  # a disk without locks
        return None
    finally:
        os.close(handle)
    return None


def _held(path: Path, place: Path, run_dir: Path) -> int:
    """Descriptor of the locked file that stands at `path`, or of the locked directory itself."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if not place.is_dir():
                raise RunDirectoryError(f"{path}: cannot be made ({error.strerror}); give another run_dir") from error
            handle = os.open(place, os.O_RDONLY)
        try:
            _lock(handle, path, run_dir)
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                return handle
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                os.ftruncate(handle, 0)
                os.pwrite(handle, str(os.getpid()).encode(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path, run_dir: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        known = stat.S_ISREG(os.fstat(handle).st_mode)
        holder = (os.pread(handle, 32, 0).decode(errors="replace") if known else "") or "unknown"
        raise RunDirectoryError(
            f"{run_dir}: another process (pid {holder}) is training it; wait for that one, stop it with Ctrl-C, "
            "or give another run_dir"
        ) from error
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise RunDirectoryError(f"{path}: cannot be locked ({error.strerror}); give another run_dir") from error
