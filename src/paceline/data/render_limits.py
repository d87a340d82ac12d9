"""Limits for chat templates: code of others that may loop for ever or ask for all memory.

Time: a template is plain Python code, so a signal ends it between two of its operations. Memory: one operation can ask
for any amount, so the system refuses it (RLIMIT_DATA, Linux).
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SECONDS = 30.0
"""One rendering of a chat takes microseconds to milliseconds."""
ROOM = 8 * 2**30
"""Bytes that preparing may take beyond what the process has before; half of the machine's memory where that is less."""


class TooSlow(Exception):
    """A rendering did not end in time."""


class Stopwatch:
    """Raises `TooSlow` in a block that takes more than `SECONDS`; in the main thread of a process only.

    It costs two attributes a block: the timer runs on over many blocks, and looks when it fires.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._armed = False

    def __enter__(self) -> None:
        self._began = time.monotonic()
        if not self._armed and threading.current_thread() is threading.main_thread():
            self._armed = True
            signal.signal(signal.SIGALRM, self._look)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)

    def __exit__(self, *_: object) -> None:
        self._began = None

    def _look(self, number: int, frame: FrameType | None) -> None:
        if self._began is None:
            self._armed = False
            return
        left = self._began + SECONDS - time.monotonic()
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, left)
            return
        self._armed = False
        raise TooSlow


STOPWATCH = Stopwatch()
"""One for the process, as there is one timer."""


@contextmanager
def limited_memory() -> Generator[None]:
    """The process cannot take more than `ROOM` beyond what it has; what asks for more gets a MemoryError."""
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _kilobytes("/proc/self/status", "VmData") + min(ROOM, _kilobytes("/proc/meminfo", "MemTotal") // 2)
    lower = [value for value in (limit, *before) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(lower), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _kilobytes(file: str, name: str) -> int:
    """A line of /proc such as ``VmData: 12 kB``, in bytes."""
    line = next(line for line in Path(file).read_text(encoding="ascii").splitlines() if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])
