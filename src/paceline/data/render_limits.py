"""Limits for chat templates: code of others that may loop for ever or ask for all memory.

Time: a template is plain Python code, so a signal ends it between two of its operations. Memory: one operation can ask
for any amount, so the system refuses it (RLIMIT_DATA, Linux).
"""

from __future__ import annotations

import signal
import sys
import threading
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


@contextmanager
def limited_time() -> Generator[None]:
    """Raises `TooSlow` in a block that computes for more than `SECONDS`; in the main thread of a process only.

    The clock counts what the process computes, so a loaded or suspended machine makes no template too slow.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _too_slow)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow


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
