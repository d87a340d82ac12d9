"""One process at a time trains a run."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import RunDirectoryError

_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def hold_run(run_dir: Path) -> Generator[None]:
    """Hold a run while it is trained: the file `.NAME.training` beside it, let go of by the system with the process.

    Workers do not inherit it, so a run whose trainer was killed can be started again at once. Disks that know no locks
    are trusted.

    Raises:
        RunDirectoryError: another process trains this run, or nothing can be written beside it.
    """
    path = run_dir.absolute().with_name(f".{run_dir.absolute().name}.training")
    handle = _held(path, run_dir)
    try:
        yield
    finally:
        # Removed while it is held: whoever opened this file finds that it is gone, and makes the next one.
        path.unlink(missing_ok=True)
        os.close(handle)


def _held(path: Path, run_dir: Path) -> int:
    """Descriptor of the locked file that stands at `path`."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as fault:
            raise RunDirectoryError(f"{path}: cannot be made ({fault.strerror}); give another run_dir") from fault
        try:
            _lock(handle, path, run_dir)
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
    except BlockingIOError as fault:
        holder = os.pread(handle, 32, 0).decode(errors="replace") or "unknown"
        raise RunDirectoryError(
            f"{run_dir}: another process (pid {holder}) is training it; wait for that one, stop it with Ctrl-C, "
            "or give another run_dir"
        ) from fault
    except OSError as fault:
        if fault.errno not in _WITHOUT_LOCKS:
            raise RunDirectoryError(f"{path}: cannot be locked ({fault.strerror}); give another run_dir") from fault
