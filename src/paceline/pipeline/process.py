"""Worker processes: a stage in a process of its own, joined to the hub by one pipe.

The child reads its pipe on a thread, so that the hub's sends never wait for work in progress, and ends itself when the
pipe closes (the parent is gone). Children ignore Ctrl-C and SIGTERM, which schedulers send to whole process groups: the
parent decides what happens then. They are forked from a server that has imported torch and nothing else, never from the
parent itself, whose threads and CUDA state do not fork.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.multiprocessing as multiprocessing

from paceline.device import own_device
from paceline.errors import PacelineError, PeerError
from paceline.pipeline.messages import Failed, Ready, Reply, Stop, describe
from paceline.pipeline.telemetry import PeakMemory

SERVER_GONE = 255
"""What multiprocessing gives as the exit code of a worker whose fork server is gone; no worker ends with it."""


class Stage(Protocol):
    """The work of one process."""

    def handle(self, message: Any) -> Iterator[Any]:
        """Do one task; yield the messages that answer it."""
        ...


def run_child(
    connection: Connection, device: str, threads: int, factory: Callable[..., Stage], arguments: tuple[Any, ...]
) -> None:
    """Main function of a worker process.

    Args:
        connection: this worker's end of the pipe.
        device: of the worker; its process acts on no other card where none is named.
        threads: CPU threads of torch.
        factory: builds the stage from ``arguments``; both must pickle.
        arguments: for the factory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(threads)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    message: Any = None
    try:
        own_device(device)
        stage = factory(*arguments)
        peaks = PeakMemory(device)
        connection.send(Reply(Ready(), memory=peaks.look()))
        while True:
            began = time.perf_counter()
            message = inbox.get()
            waited_s = time.perf_counter() - began
            if isinstance(message, Stop):
                break
            began = time.perf_counter()
            for payload in stage.handle(message):
                now = time.perf_counter()
                connection.send(Reply(payload, waited_s, now - began, time.time(), peaks.look()))
                waited_s, began = 0.0, time.perf_counter()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - sent to the parent, which stops the run
        line = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        line = line.strip().splitlines()[0] if line.strip() else type(error).__name__
        peer = isinstance(error, PeerError)
        connection.send(Reply(Failed(describe(message), line, traceback.format_exc(), peer)))
        os._exit(1)
    connection.close()
    os._exit(0)


def _read(connection: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        inbox.put(message)
        if isinstance(message, Stop):
            return


def _start_server() -> None:
    """Start the fork server, if it does not run yet, deaf to SIGTERM: its end would look like that of all workers."""
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGTERM, before)


class WorkerProcess:
    """The parent's handle of a worker process.

    Args:
        name: shown in errors, for example ``target 0 (cpu)``.
        factory, arguments, device, threads: see `run_child`.
    """

    def __init__(
        self,
        name: str,
        factory: Callable[..., Stage],
        arguments: tuple[Any, ...],
        *,
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        self.name = name
        self.outstanding: deque[Any] = deque()
        """Tasks sent and not yet answered in full, oldest first."""
        self.last_heard = time.monotonic()
        self.ready = False
        self.lost_peer = False
        """Whether it ended because another rank was gone."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", __name__])
        _start_server()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=run_child, args=(theirs, device, threads, factory, arguments), daemon=True, name=f"paceline {name}"
        )
        self.process.start()
        theirs.close()

    def send(self, task: Any) -> None:
        """Hand over a task; a worker that is gone shows at its sentinel, not here."""
        if not self.outstanding:
            self.last_heard = time.monotonic()
        self.outstanding.append(task)
        try:
            self.connection.send(task)
        except (BrokenPipeError, ConnectionResetError):
            self.last_heard = time.monotonic()

    def doing(self) -> str:
        """What the worker is working on, in words."""
        if not self.ready:
            return "start-up"
        return describe(self.outstanding[0]) if self.outstanding else "nothing"

    def silent_s(self) -> float:
        """Seconds without a sign of progress while there is work; 0 when idle."""
        busy = bool(self.outstanding) or not self.ready
        return time.monotonic() - self.last_heard if busy else 0.0

    def death(self) -> str:
        """How the process ended, in words."""
        self.process.join(5.0)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        if code == SERVER_GONE:
            return "was lost with the server that starts all workers, which was killed,"
        return f"ended with exit code {code}"

    def stop(self, patience_s: float) -> None:
        """End the process: politely, then with SIGKILL."""
        if self.process.is_alive():
            try:
                self.connection.send(Stop())
            except (BrokenPipeError, ConnectionResetError, OSError):
                patience_s = 0.0
            self.process.join(patience_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()
        self.process.close()
