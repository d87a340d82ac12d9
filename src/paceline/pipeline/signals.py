"""What a training run does on signals.

Ctrl-C and SIGTERM: the first asks for an orderly stop, the second interrupts. SIGUSR1 asks for a checkpoint, and so
does SIGHUP, unless the run writes to a terminal: that has been closed then, and the run stops in order. Where SIGHUP is
ignored (nohup), it stays so.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class GracefulStop:
    """Ctrl-C and SIGTERM: the first asks for a stop after the open window, the second interrupts at once.

    Used as a context manager around the loop; calling it says whether a stop was asked for. `training` is set by the
    loop with its first step.

    Args:
        notice: called with what the user should know.
        save: called where somebody asks for a checkpoint.
    """

    def __init__(self, notice: Callable[[str], None], save: Callable[[], None] = lambda: None) -> None:
        self._notice, self._save, self._asked, self.training = notice, save, False, False
        self._before: dict[signal.Signals, Any] = {}
        self._terminals: list[int] = []

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self._asked

    def __enter__(self) -> GracefulStop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._react)
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda number, frame: self._save())
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hang_up)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        self._save()
        if not self._terminals:
            return
        self._asked = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for terminal in self._terminals:  # writing to a closed one is an error
            os.dup2(nowhere, terminal)
        os.close(nowhere)

    def _react(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        if self.training:
            self._notice(
                "stopping: the open step is finished and a checkpoint written; once more stops at once, without"
            )
        else:
            self._notice("stopping before the first step; once more stops at once")
