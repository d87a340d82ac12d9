"""A tracker in a separate process, so no hang, exit hook or signal handler of its package reaches the run.

The trainer writes one JSON message a line to the child's standard input and never waits while it trains: what the pipe
does not take stays in a queue, whose oldest lines are dropped when it is full. The child replies once when the backend
has started, and once more when it has closed or failed. When the trainer dies, the child sees the end of its input and
closes the backend, so even a killed run leaves a tracker that can be read.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from paceline.config import ObserveConfig
from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, StepLine, encode
from paceline.observe.trackers import BACKENDS, TrackerBackend, TrackerContext
from paceline.text import first_line


class Start(msgspec.Struct, tag_field="kind", tag="start"):
    """First message: the module of the backend, and its context."""

    module: str
    settings: dict[str, Any]
    run_dir: str
    header: dict[str, Any]
    first_step: int


class Close(msgspec.Struct, tag_field="kind", tag="close"):
    """Last message."""

    status: str


class TrackerAnswer(msgspec.Struct):
    """From the child: started, or closed, or why not. ``refusal`` is an error that already says what to do."""

    error: str | None = None
    refusal: str | None = None


_MESSAGE = msgspec.json.Decoder(Start | Close | StepLine | EventLine)
_ANSWER = msgspec.json.Decoder(TrackerAnswer)


class Tracker:
    """The trainer's end. Starting waits for the backend; afterwards nothing waits and nothing raises.

    Args:
        name: key of `BACKENDS`.
        context: what the backend starts with.
        warn: is given the one warning.

    Raises:
        TrackerError: the backend failed to start or took longer than ``observe.tracker_start_limit_s``.
    """

    def __init__(self, name: str, context: TrackerContext, warn: Callable[[str], None]) -> None:
        self.name = name
        self.dropped = 0
        """Lines that the tracker did not get."""
        self._warn = warn
        self._queue: deque[bytes] = deque()
        self._queue_lines = context.settings.tracker_queue_lines
        self._rest = b""
        """What the pipe has not yet taken of the line that is being written."""
        self._warned = self._over = self._closing = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # Ctrl-C goes to the trainer, which closes its trackers itself
        )
        self._input, self._output = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        os.set_blocking(self._input.fileno(), False)
        self._start(context)

    def put(self, line: StepLine | EventLine) -> None:
        """Hand over a line; returns at once. Where the queue is full, its oldest line is dropped."""
        if self._closing:
            return
        if self._over:
            self.dropped += 1
            return
        self._queue.append(encode(line) + b"\n")
        gone = self._send()
        if gone is not None:
            self._fail(gone)
        elif len(self._queue) > self._queue_lines:
            self._queue.popleft()
            self.dropped += 1
            self._warn_once(
                f"{self.name} does not keep up: its oldest lines are dropped from now on (metrics.jsonl has them all)"
            )

    def finish(self, status: str) -> None:
        """Say that no more lines come, and take no more; `join` waits for the end."""
        self._closing = True
        if not self._over:
            self._queue.append(encode(Close(status)) + b"\n")
            gone = self._send()
            if gone is not None:
                self._fail(gone)

    def join(self, deadline: float) -> None:
        """Wait until the backend has closed or ``time.monotonic()`` is at ``deadline``; then end its process."""
        if not self._over:
            answer = self._exchange(deadline)
            if answer is None:
                limit = "within observe.tracker_close_limit_s"
                self._warn_once(f"{self.name} did not finish {limit} and is left behind; metrics.jsonl has everything")
            elif answer != TrackerAnswer():
                self._fail(answer)
        self._end(deadline)

    def _start(self, context: TrackerContext) -> None:
        limit_s = context.settings.tracker_start_limit_s
        message = Start(
            BACKENDS[self.name],
            context.settings.model_dump(mode="json"),
            str(context.run_dir.absolute()),
            dict(context.header),
            context.first_step,
        )
        self._queue.append(encode(message) + b"\n")
        answer = self._exchange(time.monotonic() + limit_s)
        if answer == TrackerAnswer():
            return
        self._end(0.0)
        if answer is None:
            raise TrackerError(
                f"{self.name} did not start within {limit_s:g} s; switch it off in `observe` or raise "
                "observe.tracker_start_limit_s"
            )
        raise TrackerError(
            answer.refusal or f"{self.name} cannot start ({answer.error}); correct that or switch it off in `observe`"
        )

    def _send(self) -> TrackerAnswer | None:
        """Write as much as the pipe takes; gives why, where the child is gone."""
        while self._rest or self._queue:
            self._rest = self._rest or self._queue.popleft()
            try:
                self._rest = self._rest[os.write(self._input.fileno(), self._rest) :]
            except BlockingIOError:
                return None
            except OSError:
                return self._answer()
        return None

    def _exchange(self, deadline: float) -> TrackerAnswer | None:
        """Write what waits and read the child's next answer; None where it does not come in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._input, selectors.EVENT_WRITE)
            while (left_s := deadline - time.monotonic()) > 0:
                ready = {key.fileobj for key, _ in selector.select(left_s)}
                if self._output in ready:
                    return self._answer()
                if self._input in ready:
                    gone = self._send()
                    if gone is not None:
                        return gone
                    if not self._rest:
                        selector.unregister(self._input)
        return None

    def _answer(self) -> TrackerAnswer:
        row = self._output.readline()
        return (
            _ANSWER.decode(row) if row else TrackerAnswer(error=f"its process ended with code {self._process.wait()}")
        )

    def _fail(self, answer: TrackerAnswer) -> None:
        self._over = True
        self.dropped += len(self._queue) + 1
        self._queue.clear()
        self._rest = b""
        self._warn_once(
            f"{self.name} failed and is dropped ({answer.refusal or answer.error}); metrics.jsonl has everything"
        )

    def _end(self, deadline: float) -> None:
        self._over = True
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(text)


def serve() -> None:
    """The child's end: start the backend named in the first message, then take lines until it is closed or fails."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the trainer decides what becomes of a run whose terminal is closed
    os.dup2(2, 1)  # what a package prints must not be taken for an answer
    backend: TrackerBackend | None = None
    for row in sys.stdin.buffer:
        message = _MESSAGE.decode(row)
        try:
            if isinstance(message, Start):
                settings, run_dir = ObserveConfig.model_validate(message.settings), Path(message.run_dir)
                context = TrackerContext(settings, run_dir, message.header, message.first_step)
                backend = importlib.import_module(message.module).start(context)
            elif backend is not None and isinstance(message, Close):
                backend.close(message.status)
            elif backend is not None and not isinstance(message, Close):
                backend.write(message)
        except TrackerError as error:
            answer = TrackerAnswer(refusal=str(error))
        except BaseException as error:  # noqa: BLE001 - the package may raise anything; the trainer says so
            answer = TrackerAnswer(error=f"{type(error).__name__}: {first_line(error)}"[:2000])
        else:
            answer = TrackerAnswer()
        if isinstance(message, (Start, Close)) or answer != TrackerAnswer():
            answers.write(encode(answer) + b"\n")
        if isinstance(message, Close) or answer != TrackerAnswer():
            return
    if backend is not None:
        backend.close("failed: the trainer is gone")


if __name__ == "__main__":
    serve()
