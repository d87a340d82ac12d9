"""torch's profiler over a window of optimizer steps, in whichever process takes them."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from paceline.atomic_files import replacing
from paceline.device import num_cards

PROFILE_FILE = "profile.json"


def clear_profile(steps: Sequence[int] | None, path: Path, first_step: int) -> None:
    """Remove the profile of an earlier start, unless its steps are over: they will not be taken again.

    Args:
        steps: [first, last] optimizer step to profile, if any.
        path: the file.
        first_step: step that the run continues from.
    """
    if steps is None or first_step < steps[1]:
        path.unlink(missing_ok=True)


_MARKS = (b"USDT:", b"gpuGetDeviceCount failed")
"""In lines that the profiler prints without cause; the second where torch is built for CUDA and there is no card."""


class StepProfile:
    """Profiles the steps ``first`` to ``last`` and writes a file that ui.perfetto.dev opens.

    Args:
        steps: [first, last] optimizer step, both included; None profiles nothing.
        path: the file.
    """

    def __init__(self, steps: Sequence[int] | None, path: Path) -> None:
        self._steps, self._path = steps, path
        self._running: profile | None = None

    def before(self, step: int) -> None:
        """Work of a step follows; the first call of a step in the window starts the profiler."""
        if self._steps is None or self._running is not None or not self._steps[0] <= step <= self._steps[1]:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if num_cards() else [])]
        self._running = profile(activities=activities, record_shapes=True)
        with without_marks():
            self._running.start()

    def after(self, step: int, *, last: bool = False) -> None:
        """A step is done; the last of the window, or of the run, writes the file."""
        if self._running is None or self._steps is None or not (last or step >= self._steps[1]):
            return
        running, self._running, self._steps = self._running, None, None
        with without_marks():
            running.stop()
        with replacing(self._path) as aside:
            running.export_chrome_trace(str(aside))


@contextlib.contextmanager
def without_marks() -> Generator[None]:
    """Keep the profiler's marks (`_MARKS`) from standard error; anything else written there meanwhile comes after.

    The profiler's own log level would silence its errors too.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            caught.seek(0)
            with os.fdopen(terminal, "wb") as stream:
                stream.writelines(line for line in caught if not any(mark in line for mark in _MARKS))
