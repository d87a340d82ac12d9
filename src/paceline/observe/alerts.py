"""Alerts: a command of the user's that is run when a step is skipped, when the loss jumps, and when the run ends.

The command works on its own; nothing waits for it but the end of the run. One that fails or hangs costs that alert and,
the first time, a warning.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

from paceline.config import ObserveConfig
from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, StepLine

COMMAND_LIMIT_S = 20.0
"""How long a command may run."""
RECENT_LINES = 50
"""Lines that say what loss is usual."""
QUIET_LINES = 20
"""Lines after an alert in which no alert of the same kind is sent."""
MAX_TEXT = 2000
"""Characters of an alert's sentence; a pipe takes such an object at once."""


class Alerts:
    """Looks at the lines and runs ``observe.alert_command`` with one JSON object on its standard input.

    Args:
        settings: of the run; ``alert_command`` is set.
        run_dir: named in every alert.
        warn: is given, once, why an alert could not be sent.

    Raises:
        TrackerError: there is no such program.
    """

    def __init__(self, settings: ObserveConfig, run_dir: Path, warn: Callable[[str], None]) -> None:
        self._command, self._jump = settings.alert_command, settings.alert_jump
        self._run_dir = run_dir.resolve()
        self._warn = warn
        self._recent: deque[float] = deque(maxlen=RECENT_LINES)
        self._quiet_until: dict[str, int] = {}
        self._lines = 0
        self._failure_sent = False
        self._running: list[tuple[subprocess.Popen[bytes], float]] = []
        self._warned = False
        if shutil.which(self._command[0]) is None:
            raise TrackerError(f"observe.alert_command: {self._command[0]}: no such program; give its full path")

    def see(self, line: StepLine | EventLine) -> None:
        """Look at one line; returns at once."""
        self._collect()
        if isinstance(line, EventLine):
            if line.event == "failure":
                self._failure_sent = True
                self._send("failed", f"failed: {line.fields.get('error', '')}", line.step)
            return
        self._lines += 1
        loss = line.values.get("loss")
        if line.values.get("gradient/skipped") or loss is None or not math.isfinite(loss):
            what = f"step {line.step}" if line.steps == 1 else f"one of the {line.steps} steps up to {line.step}"
            self._send_now_and_then("not-finite", f"{what} was skipped or has a loss that is not a number", line.step)
        else:
            self._look_at(loss, line.step)

    def close(self, status: str, step: int) -> None:
        """Say how the run ended, and wait for the commands that still run, `COMMAND_LIMIT_S` at most."""
        if not self._failure_sent:
            self._send("ended", f"{status} at step {step}", step)
        for process, deadline in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
        self._collect()

    def _look_at(self, loss: float, step: int) -> None:
        if len(self._recent) == RECENT_LINES:
            usual = median(self._recent)
            scatter = 1.4826 * median(abs(value - usual) for value in self._recent)
            if loss > usual + self._jump * max(scatter, 1e-3 * abs(usual)):
                what = f"loss jumped from about {usual:.3f} to {loss:.3f} at step {step}"
                self._send_now_and_then("loss-jump", what, step)
        self._recent.append(loss)

    def _send_now_and_then(self, kind: str, what: str, step: int) -> None:
        quiet_until = self._quiet_until.get(kind, 0)
        self._quiet_until[kind] = self._lines + QUIET_LINES
        if self._lines >= quiet_until:
            self._send(kind, what, step)

    def _send(self, kind: str, what: str, step: int) -> None:
        text = f"paceline {self._run_dir.name}: {what}"[:MAX_TEXT]
        alert = {"kind": kind, "text": text, "run_dir": str(self._run_dir), "step": step}
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:
            process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True, **silent)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self._running.append((process, time.monotonic() + COMMAND_LIMIT_S))
        if process.stdin is not None:
            # A command that does not read its input is right if it ends well.
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(json.dumps(alert).encode())

    def _collect(self) -> None:
        """Forget commands that have ended, and end those that run too long."""
        failed: list[str] = []
        running, self._running = self._running, []
        for process, deadline in running:
            if process.poll() is not None:
                failed += [f"exit code {process.returncode}"] if process.returncode else []
            elif time.monotonic() < deadline:
                self._running.append((process, deadline))
            else:
                process.kill()
                process.wait()
                failed.append(f"it was ended after {COMMAND_LIMIT_S:g} s")
        for why in failed[:1]:  # last, since a warning is an event that comes back here
            self._fail(why)

    def _fail(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"alert command {self._command[0]}: {why}; this alert is lost, later alerts are still sent")
