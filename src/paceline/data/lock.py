"""One process at a time prepares a store."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import DataError


@contextmanager
def store_lock(store: Path, waiting: Callable[[], None]) -> Generator[None, None, None]:
    """Hold the lock of a store: the file `.NAME.lock` beside it, which the system lets go of when a process ends.

    Where nothing can be written beside a store that is there, none is needed, and nothing is locked.

    Args:
        store: folder of the store; its parent is made.
        waiting: called once where another process holds the lock, before waiting for it.

    Raises:
        DataError: no file can be made beside the store, or the disk locks no files.
    """
    path = store.with_name(f".{store.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquired(path, waiting)
    except PermissionError as error:
        if not store.exists():
            raise _unusable(path, error) from error
        yield
        return
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        yield
    finally:
        # Removed while it is held: whoever waits for this file finds that it is gone, and makes the next one.
        path.unlink(missing_ok=True)
        os.close(handle)


def _acquired(path: Path, waiting: Callable[[], None]) -> int:
    """Descriptor of the locked file that stands at `path`."""
    told = False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    waiting()
                    told = True
                fcntl.flock(handle, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _unusable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be made or locked ({error.strerror}); give a data.store on a disk that allows it")
