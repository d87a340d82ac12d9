"""Tracker: trackio on this machine; ``trackio show`` displays it. Nothing is sent anywhere."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING

from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, StepLine

if TYPE_CHECKING:
    from paceline.observe.trackers import TrackerContext


class TrackioRun:
    """One trackio run, resumed under the name of the run directory.

    Args:
        context: settings, directory and header of the run.

    Raises:
        TrackerError: the package is missing.
    """

    def __init__(self, context: TrackerContext) -> None:
        try:
            trackio = importlib.import_module("trackio")
        except ImportError as error:
            raise TrackerError(
                "observe.trackio is on, its package is missing; pip install 'paceline[trackio]' or switch it off"
            ) from error
        self._run = trackio.init(
            project=context.settings.wandb_project,
            name=context.run_dir.resolve().name,
            config=json.loads(json.dumps(dict(context.header), default=str)),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, line: StepLine | EventLine) -> None:
        """The values of a step; events have no place there but in the log."""
        if isinstance(line, StepLine):
            values = {name: value for name, value in line.values.items() if value is not None}
            self._run.log(values, step=line.step)

    def close(self, status: str) -> None:
        """Write out what is buffered."""
        self._run.finish()


start = TrackioRun
