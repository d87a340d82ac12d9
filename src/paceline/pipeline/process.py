"""Worker processes: a stage in its own process, joined to the coordinator by one pipe.

The child reads its pipe on a thread, so that the coordinator's sends never wait for work in progress, and ends itself
when the pipe closes (the parent is gone). Children ignore Ctrl-C and SIGTERM, which schedulers send to whole process
groups: the parent decides what happens then. They are forked from a server that has imported torch and nothing else,
never from the parent itself, whose threads and CUDA state do not fork.
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
from contextlib import ExitStack
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from paceline.device import Mark, deterministic_algorithms, own_device
from paceline.errors import PacelineError, PeerError
from paceline.pipeline.messages import START_UP, Failed, Ready, Reply, Stop, describe
from paceline.pipeline.telemetry import PeakMemory
from paceline.text import first_line

SERVER_GONE = 255
"""What multiprocessing gives as the exit code of a worker whose fork server is gone; no worker ends with it."""


POLL_S = 0.0005
"""A worker with nothing else to do looks this often whether its GPU has done what it was asked."""


WEIGHTS_OR_TOKENS = (".safetensors", ".gguf", ".bin", ".arrow", ".npy")
"""Ends of the names of files that workers map."""


class Stage:
    """The work of one process."""

    def handle(self, message: Any) -> Iterator[Any]:
        """Do one task; yield the messages that answer it, or those of earlier tasks that are done by now."""
        raise NotImplementedError

    @property
    def unanswered(self) -> int:
        """Tasks that were begun and have no answer yet, once `handle` has returned: those that a GPU still works on."""
        return 0

    def answers(self) -> Iterator[Any]:
        """The answers of tasks that are done by now, oldest first; never waits."""
        return iter(())


class TaskClock:
    """Seconds that a worker worked and waited.

    On a GPU, work is the time of its queue, read when that has come so far, so mostly one task later: the host's time
    says no more than how long it took to queue kernels.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._running: deque[tuple[Mark, Mark]] = deque()
        self._last = time.perf_counter()
        self._ahead_s = 0.0
        self.begin()

    def begin(self) -> None:
        """A task begins."""
        self._begun = Mark(self._device, timed=True)

    def end(self) -> tuple[float, float]:
        """An answer goes out: seconds without and with work since the one before."""
        self._running.append((self._begun, Mark(self._device, timed=True)))
        busy_s = 0.0
        while self._running and self._running[0][1].reached():
            begun, ended = self._running.popleft()
            busy_s += ended.seconds_since(begun)
        now = time.perf_counter()
        # Work that is read late was counted as waiting before: it is taken off what comes next.
        free_s = now - self._last - busy_s + self._ahead_s
        self._last, self._ahead_s = now, min(0.0, free_s)
        self.begin()
        return max(0.0, free_s), busy_s


def run_child(
    connection: Connection,
    device: str,
    threads: int,
    deterministic: bool,
    factory: Callable[..., Stage],
    arguments: tuple[Any, ...],
) -> None:
    """Main function of a worker process.

    Args:
        connection: this worker's end of the pipe.
        device: of the worker; its process acts on no other card where none is named.
        threads: CPU threads of torch.
        deterministic: whether everything must give the same bits each time.
        factory: builds the stage from ``arguments``; both must pickle.
        arguments: for the factory.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    message: Any = None
    stack = ExitStack()  # never left: the process ends first
    try:
        own_device(device)
        stack.enter_context(deterministic_algorithms(deterministic))
        stage = factory(*arguments)
        peaks = PeakMemory(device)
        connection.send(Reply(Ready(), memory=peaks.look()))
        clock = TaskClock(device)

        def answer(payloads: Iterator[Any]) -> None:
            for payload in payloads:
                connection.send(Reply(payload, *clock.end(), time.time(), peaks.look()))

        while True:
            while stage.unanswered and inbox.empty():
                answer(stage.answers())
                time.sleep(POLL_S)
            message = inbox.get()
            if isinstance(message, Stop):
                break
            clock.begin()
            answer(stage.handle(message))
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - sent to the parent, which stops the run
        line = first_line(error)
        if not isinstance(error, PacelineError):
            line = f"{type(error).__name__}: {line}"
        connection.send(Reply(Failed(describe(message), line, traceback.format_exc(), isinstance(error, PeerError))))
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
    """Start the fork server, if it does not run yet. It ignores SIGTERM: its end looks like that of all workers."""
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGTERM, before)


def mapped_files(pid: int | None) -> dict[Path, int]:
    """Bytes of each file of weights or tokens that a process has mapped into its memory, on Linux."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    names = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    paths = [Path(name) for name in names if name.startswith("/") and name.endswith(WEIGHTS_OR_TOKENS)]
    return {path: path.stat().st_size for path in paths if path.is_file()}


class WorkerProcess:
    """The parent's handle of a worker process.

    Args:
        name: shown in errors, for example ``target 0 (cpu)``.
        factory, arguments, device, threads, deterministic: see `run_child`.
        max_outstanding: tasks that may be sent before the first of them is answered.
    """

    def __init__(
        self,
        name: str,
        factory: Callable[..., Stage],
        arguments: tuple[Any, ...],
        *,
        device: str = "cpu",
        threads: int = 1,
        deterministic: bool = False,
        max_outstanding: int = 1,
    ) -> None:
        self.name, self.max_outstanding = name, max_outstanding
        self.key = name.partition(" (")[0].replace(" ", "_")
        """Name in metrics: ``target_0``."""
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
            target=run_child,
            args=(theirs, device, threads, deterministic, factory, arguments),
            daemon=True,
            name=f"paceline {name}",
        )
        self.process.start()
        theirs.close()
        self._mapped: dict[Path, int] | None = None

    def send(self, task: Any) -> None:
        """Hand over a task; a worker that is gone shows at its sentinel, not here."""
        if self._mapped is None and self.ready:
            self._mapped = mapped_files(self.process.pid)
        if not self.outstanding:
            self.last_heard = time.monotonic()
        self.outstanding.append(task)
        try:
            self.connection.send(task)
        except (BrokenPipeError, ConnectionResetError):
            self.last_heard = time.monotonic()

    def doing(self) -> str:
        """What the worker is working on, for errors."""
        if not self.ready:
            return START_UP
        return describe(self.outstanding[0]) if self.outstanding else "nothing"

    def silent_s(self) -> float:
        """Seconds without a sign of progress while there is work; 0 when idle."""
        busy = bool(self.outstanding) or not self.ready
        return time.monotonic() - self.last_heard if busy else 0.0

    def death(self) -> str:
        """How the process ended, for errors."""
        self.process.join(5.0)
        code = self.process.exitcode
        if code == -signal.SIGBUS:
            sizes = {path: path.stat().st_size if path.exists() else 0 for path in self._mapped or {}}
            cut = [str(path) for path, size in (self._mapped or {}).items() if sizes[path] < size]
            named = f"{', '.join(cut)} was cut" if cut else "a file that it reads was cut, or its disk does not answer,"
            return f"was killed by SIGBUS: {named} under it; put the file back; it ended"
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        if code == SERVER_GONE:
            return "ended together with the server that starts all workers, which was killed,"
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
