"""Tracker: TensorBoard, one event file a start under ``RUN/tensorboard``, written with torch's writer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, StepLine

if TYPE_CHECKING:
    from paceline.observe.trackers import TrackerContext


class TensorBoardEvents:
    """Scalars by optimizer step, events as text; steps that a resumed run trains again replace the earlier ones."""

    def __init__(self, context: TrackerContext) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TrackerError(
                "observe.tensorboard is on, its package is missing; pip install 'paceline[tensorboard]' or switch off"
            ) from error
        folder = str(context.run_dir / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=context.first_step + 1, flush_secs=10)
        self._text(context.first_step, 0.0, "header", dict(context.header))

    def write(self, line: StepLine | EventLine) -> None:
        """Scalars of a step, or an event as text."""
        if isinstance(line, EventLine):
            self._text(line.step, line.time, f"event/{line.event}", line.fields)
            return
        for name, value in line.values.items():
            if value is not None:
                self._writer.add_scalar(name, value, line.step, line.time)

    def close(self, status: str) -> None:
        """Write the file out; ``status`` is in the events already."""
        self._writer.close()

    def _text(self, step: int, time: float, tag: str, content: dict[str, Any]) -> None:
        text = "    " + json.dumps(content, indent=2, default=str).replace("\n", "\n    ")
        self._writer.add_text(tag, text, step, time)


start = TensorBoardEvents
