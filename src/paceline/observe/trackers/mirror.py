"""A mirror: a sink on a thread of its own behind a bounded queue, so that it can never hold up the run.

Starting is part of the run's start: what cannot start is refused. Afterwards the mirror is on its own: when it fails it
is dropped, when it blocks the oldest lines are dropped, and either costs one warning. metrics.jsonl has everything.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, StepLine

Warn = Callable[[str], None]


class Sink(Protocol):
    """Where lines go. All calls but `abandon` come from the mirror's thread."""

    def start(self) -> None:
        """Get ready, or raise; a `TrackerError` is shown as it is."""
        ...

    def write(self, line: StepLine | EventLine) -> None:
        """Take one line."""
        ...

    def close(self, status: str) -> None:
        """No more lines; ``status`` is how the run ended."""
        ...

    def abandon(self) -> None:
        """The sink hangs and is left behind: let go of whatever would keep the program from ending."""
        ...


class Mirror:
    """Runs one sink on a daemon thread.

    Args:
        name: for warnings.
        sink: where lines go.
        queue_lines: lines waiting at most.
        start_limit_s: seconds that the sink may take to start.
        warn: hears the one warning, from any thread.

    Raises:
        TrackerError: the sink failed to start or took too long.
    """

    def __init__(self, name: str, sink: Sink, *, queue_lines: int, start_limit_s: float, warn: Warn) -> None:
        self.name = name
        self._sink = sink
        self.dropped = 0
        self.failed = False
        self._warn = warn
        self._warned = False
        self._queue_lines = queue_lines
        self._lines: deque[StepLine | EventLine] = deque()
        self._status: str | None = None
        self._wake = threading.Condition()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"observe-{name}", daemon=True)
        self._thread.start()
        if not self._started.wait(start_limit_s):
            sink.abandon()
            raise TrackerError(
                f"{name} did not start within {start_limit_s:g} s; switch it off in `observe` or raise "
                "observe.mirror_start_limit_s"
            )
        if self._error is not None:
            sink.abandon()
            if isinstance(self._error, TrackerError):
                raise self._error
            raise TrackerError(
                f"{name} cannot start ({_one_line(self._error)}); correct that or switch it off in `observe`"
            ) from self._error

    def put(self, line: StepLine | EventLine) -> None:
        """Queue a line; never blocks, never raises. After `finish` nothing more is taken."""
        overflow = False
        with self._wake:
            if self._status is not None:
                return
            if self.failed:
                self.dropped += 1
                return
            if len(self._lines) >= self._queue_lines:
                self._lines.popleft()
                self.dropped += 1
                overflow = True
            self._lines.append(line)
            self._wake.notify()
        if overflow:
            self._warn_once(
                f"{self.name} does not keep up: its oldest lines are dropped from now on (metrics.jsonl has them all)"
            )

    def finish(self, status: str) -> None:
        """Tell the sink that no more lines come; `join` waits for it."""
        with self._wake:
            self._status = status
            self._wake.notify()

    def join(self, limit_s: float) -> None:
        """Wait until the sink has closed, at most ``limit_s`` seconds."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._warn_once(f"{self.name} did not finish within observe.mirror_close_limit_s and is left behind")
            self._sink.abandon()

    def _run(self) -> None:
        sink = self._sink
        try:
            sink.start()
        except BaseException as error:  # noqa: BLE001 - a sink's SDK may raise anything, SystemExit too
            self._error = error
            self._started.set()
            return
        self._started.set()
        try:
            while (line := self._next()) is not None:
                sink.write(line)
            sink.close(self._status or "finished")
        except BaseException as error:  # noqa: BLE001 - whatever a mirror throws must not reach the run
            with self._wake:
                self.failed = True
                self.dropped += len(self._lines) + 1
                self._lines.clear()
            sink.abandon()
            self._warn_once(f"{self.name} failed and is dropped ({_one_line(error)}); metrics.jsonl goes on")

    def _next(self) -> StepLine | EventLine | None:
        with self._wake:
            while not self._lines and self._status is None:
                self._wake.wait()
            return self._lines.popleft() if self._lines else None

    def _warn_once(self, text: str) -> None:
        with self._wake:
            if self._warned:
                return
            self._warned = True
        self._warn(text)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
