"""Alerts: a command or a webhook that hears of a skipped step, a loss that jumps, a stall, and the end of the run.

A tracker like any other (`trackers.mirror`): it works on a thread of its own, and a command that hangs or an
address that does not answer costs that alert and, the first time, a warning; never the run, nor the next alert.
"""

from __future__ import annotations

import functools
import http.client
import json
import math
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

from paceline.config import ObserveConfig
from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, StepLine

DELIVERY_LIMIT_S = 20.0
"""How long a command may run or an address may take to answer."""
RECENT_LINES = 50
"""Lines that say what loss is usual."""
QUIET_LINES = 20
"""Lines after an alert in which the same kind is not told again."""


class Alerts:
    """Watches the lines and tells a command, a webhook, or both.

    Args:
        settings: of the run.
        run_dir: named in every alert.
        first_step: step that the run goes on from.
        warn: hears, once, that an alert could not be delivered; from any thread.
    """

    def __init__(self, settings: ObserveConfig, run_dir: Path, first_step: int, warn: Callable[[str], None]) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._warn = warn
        self._recent: deque[float] = deque(maxlen=RECENT_LINES)
        self._quiet: dict[str, int] = {}
        self._lines = 0
        self._step = first_step
        self._seen = threading.Event()
        self._over = False
        self._told_failure = False
        self._stall_watch = threading.Thread(target=self._watch_for_stalls, name="observe-stalls", daemon=True)
        self.failed_deliveries = 0
        """Alerts that did not arrive."""

    def start(self) -> None:
        """Check that the command and the address can be used at all.

        Raises:
            TrackerError: they cannot.
        """
        command, address = self._settings.alert_command, self._settings.alert_webhook
        if command and shutil.which(command[0]) is None:
            raise TrackerError(f"observe.alert_command: {command[0]}: no such program; give its full path")
        if address is not None and urllib.parse.urlsplit(address).scheme not in ("http", "https"):
            raise TrackerError(f"observe.alert_webhook: {address}: not an address; it starts with http:// or https://")
        self._stall_watch.start()

    def write(self, line: StepLine | EventLine) -> None:
        """Look at one line."""
        if isinstance(line, EventLine):
            if line.event == "failure":
                self._told_failure = True
                self._tell("failed", f"failed: {line.fields.get('error', '')}", line.step)
            return
        self._lines += 1
        loss = line.values.get("loss")
        if line.values.get("gradient/skipped") or loss is None or not math.isfinite(loss):
            what = f"step {line.step}" if line.steps == 1 else f"one of the {line.steps} steps up to {line.step}"
            self._tell_now_and_then("not-finite", f"{what} was skipped or has a loss that is no number", line.step)
        else:
            self._look_at(loss, line.step)

    def passed(self, step: int) -> None:
        """An optimizer step is done, whether or not a line says so yet. From any thread; returns at once."""
        self._step = step
        self._seen.set()

    def close(self, status: str) -> None:
        """Tell how the run ended."""
        self._over = True
        self._seen.set()
        if not self._told_failure:
            self._tell("ended", f"{status} at step {self._step}", self._step)

    def abandon(self) -> None:
        """Nothing of it outlives its time limit."""
        self._over = True
        self._seen.set()

    def _look_at(self, loss: float, step: int) -> None:
        if len(self._recent) == RECENT_LINES:
            usual = median(self._recent)
            scatter = 1.4826 * median(abs(value - usual) for value in self._recent)
            if loss > usual + self._settings.alert_jump * max(scatter, 1e-3 * abs(usual)):
                what = f"loss jumped from about {usual:.3f} to {loss:.3f} at step {step}"
                self._tell_now_and_then("loss-jump", what, step)
        self._recent.append(loss)

    def _watch_for_stalls(self) -> None:
        while not self._over:
            if self._seen.wait(self._settings.alert_after_s):
                self._seen.clear()
                continue
            step = self._step
            self._tell("stall", f"no step for {self._settings.alert_after_s:g} s after step {step}", step)
            self._seen.wait()
            self._seen.clear()

    def _tell_now_and_then(self, kind: str, what: str, step: int) -> None:
        quiet_until = self._quiet.get(kind, 0)
        self._quiet[kind] = self._lines + QUIET_LINES
        if self._lines >= quiet_until:
            self._tell(kind, what, step)

    def _tell(self, kind: str, what: str, step: int) -> None:
        run = self._run_dir.resolve()
        alert = {"kind": kind, "text": f"paceline {run.name}: {what}", "run_dir": str(run), "step": step}
        data = json.dumps(alert).encode()
        if self._settings.alert_command:
            self._try(self._run_command, data)
        if self._settings.alert_webhook is not None:
            self._try(functools.partial(self._post, self._settings.alert_webhook), data)

    def _try(self, deliver: Callable[[bytes], None], data: bytes) -> None:
        try:
            deliver(data)
        except RuntimeError as error:
            self.failed_deliveries += 1
            if self.failed_deliveries == 1:
                self._warn(f"{error}; this alert is lost, later alerts are still sent")

    def _run_command(self, data: bytes) -> None:
        command = self._settings.alert_command
        try:
            subprocess.run(
                command,
                input=data,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=DELIVERY_LIMIT_S,
                check=True,
            )
        except (subprocess.SubprocessError, OSError) as error:
            raise RuntimeError(f"alert command {command[0]}: {error}") from error

    def _post(self, address: str, data: bytes) -> None:
        request = urllib.request.Request(address, data=data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=DELIVERY_LIMIT_S) as answer:
                answer.read()
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
            raise RuntimeError(f"alert webhook {urllib.parse.urlsplit(address).netloc}: {error}") from error
