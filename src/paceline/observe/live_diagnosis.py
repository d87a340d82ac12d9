"""The diagnosis while the run goes on: every so many steps, on the newest lines, each warning once."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from paceline.observe.diagnosis.diagnose import Finding, diagnose
from paceline.observe.metrics_file import EventLine, HeaderLine, StepLine
from paceline.observe.run_files import read_settings
from paceline.observe.run_history import assemble

MEMORY_LINES = 1000
"""Newest lines that are looked at; a look at a thousand takes about 20 ms."""


class Watch:
    """Keeps the newest lines and looks at them now and then.

    Args:
        run_dir: directory of the run; its settings.yaml says what advice fits.
        header: of this start.
        every_steps: optimizer steps between looks; 0 for never.
    """

    def __init__(self, run_dir: Path, header: HeaderLine, every_steps: int) -> None:
        self._run_dir = run_dir
        self._header = header
        self._every_steps = every_steps
        self._lines: deque[StepLine] = deque(maxlen=MEMORY_LINES)
        self._events: deque[EventLine] = deque(maxlen=MEMORY_LINES)
        self._next = header.step + every_steps
        self._told: set[str] = set()

    def hear(self, line: EventLine) -> None:
        """Take in an event, for the next look."""
        self._events.append(line)

    def see(self, line: StepLine) -> list[Finding]:
        """Take in a line.

        Returns:
            Warnings that were not told before, where it was time to look.
        """
        if not self._every_steps:
            return []
        self._lines.append(line)
        if line.step < self._next and line.step < self._header.total_steps:  # the last step is always a look
            return []
        self._next = line.step + self._every_steps
        settings = read_settings(self._run_dir, [])
        run = assemble(self._run_dir, [self._header, *self._lines, *self._events], settings, {}, [], [])
        fresh = [finding for finding in diagnose(run) if finding.level == "warning" and finding.key not in self._told]
        self._told.update(finding.key for finding in fresh)
        return fresh
