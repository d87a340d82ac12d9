"""A mirror's backend in a process of its own, so that no hang, exit hook or signal handler of its package is ours.

The trainer writes one JSON message a line to the child's standard input and reads one reply a message. When the trainer
dies, the child sees the end of its input and closes the backend, so even a killed run leaves a mirror that can be read.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import ObserveConfig
from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, StepLine, encode
from paceline.observe.trackers import SinkContext, open_backend


class Start(msgspec.Struct, tag_field="kind", tag="start"):
    """First message: which backend, and its context."""

    name: str
    settings: dict[str, Any]
    run_dir: str
    header: dict[str, Any]
    first_step: int


class Close(msgspec.Struct, tag_field="kind", tag="close"):
    """Last message."""

    status: str


class Reply(msgspec.Struct):
    """One a message. ``refusal`` is an error that already says what to do."""

    error: str | None = None
    refusal: str | None = None


_MESSAGE = msgspec.json.Decoder(Start | Close | StepLine | EventLine)
_REPLY = msgspec.json.Decoder(Reply)


class IsolatedSink:
    """The trainer's end of a backend; see `paceline.observe.trackers.mirror.Sink`.

    Args:
        name: key of the backend.
        context: what it starts with.
    """

    def __init__(self, name: str, context: SinkContext) -> None:
        self._name = name
        self._context = context
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # Ctrl-C is the trainer's business; it closes its mirrors itself
        )

    def start(self) -> None:
        """Start the backend and wait for its word.

        Raises:
            TrackerError: it cannot start, and says what to do.
        """
        context = self._context
        message = Start(
            self._name,
            context.settings.model_dump(mode="json"),
            str(context.run_dir.absolute()),
            dict(context.header),
            context.first_step,
        )
        self._ask(message)

    def write(self, line: StepLine | EventLine) -> None:
        """Hand over one line and wait until it was taken.

        Raises:
            RuntimeError: the backend failed, or its process is gone.
        """
        self._ask(line)

    def close(self, status: str) -> None:
        """Close the backend and wait for the end of its process."""
        self._ask(Close(status))
        self._process.wait()
        self._hang_up()

    def abandon(self) -> None:
        """End the process, whatever it is doing. From any thread."""
        self._process.kill()
        self._process.wait()

    def _ask(self, message: Start | Close | StepLine | EventLine) -> None:
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        try:
            process.stdin.write(encode(message) + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = b""
        reply = _REPLY.decode(answer) if answer else Reply(error=f"its process ended with code {process.wait()}")
        if reply.refusal is not None or reply.error is not None:
            self._hang_up()
            raise TrackerError(reply.refusal) if reply.refusal is not None else RuntimeError(reply.error)

    def _hang_up(self) -> None:
        """Close the pipes of a child that says no more."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was still buffered for a dead child cannot be flushed
                    pipe.close()


def serve() -> None:
    """The child's end: start the backend named in the first message, then take lines until it is closed."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a package prints must not be taken for a reply
    backend = None
    for row in sys.stdin.buffer:
        message = _MESSAGE.decode(row)
        reply = Reply()
        try:
            if isinstance(message, Start):
                backend = open_backend(message.name, _context(message))
            elif backend is not None and isinstance(message, Close):
                backend.close(message.status)
            elif backend is not None and isinstance(message, (StepLine, EventLine)):
                backend.write(message)
        except TrackerError as error:
            reply = Reply(refusal=str(error))
        except BaseException as error:  # noqa: BLE001 - the package may raise anything; the trainer is told
            reply = Reply(error=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        replies.write(encode(reply) + b"\n")
        if isinstance(message, Close) or reply != Reply():
            return
    if backend is not None:
        backend.close("failed: the trainer is gone")


def _context(start: Start) -> SinkContext:
    return SinkContext(
        ObserveConfig.model_validate(start.settings), Path(start.run_dir), start.header, start.first_step
    )


if __name__ == "__main__":
    serve()
