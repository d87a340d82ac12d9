"""Tracker: TensorBoard: one event file a start under ``RUN/tensorboard``, written with TensorBoard's own writer."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Any

from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, StepLine

if TYPE_CHECKING:
    from paceline.observe.trackers import TrackerContext


_MODULES = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.compat.proto.tensor_pb2",
    "tensorboard.compat.proto.tensor_shape_pb2",
    "tensorboard.plugins.text.metadata",
    "tensorboard.summary.writer.event_file_writer",
)


def start(context: TrackerContext) -> TensorBoardEvents:
    """Open the tracker.

    Raises:
        TrackerError: the package is missing.
    """
    return TensorBoardEvents(context)


class TensorBoardEvents:
    """Scalars by optimizer step; steps that a resumed run trains again replace the earlier ones.

    Args:
        context: directory and header of the run.

    Raises:
        TrackerError: the package is missing.
    """

    def __init__(self, context: TrackerContext) -> None:
        try:
            event, summary, tensor, shape, text, writer = map(importlib.import_module, _MODULES)
        except ImportError as error:
            raise TrackerError(
                "observe.tensorboard is on, its package is missing; pip install 'paceline[tensorboard]' or switch off"
            ) from error
        self._event, self._summary = event.Event, summary.Summary
        self._tensor, self._shape = tensor.TensorProto, shape.TensorShapeProto
        self._text_metadata = text.create_summary_metadata
        self._writer = writer.EventFileWriter(str(context.run_dir / "tensorboard"), flush_secs=10)
        # TensorBoard drops what earlier files hold from this step on.
        log = event.SessionLog(status=event.SessionLog.START)
        self._writer.add_event(self._event(step=context.first_step + 1, session_log=log))
        self._text(context.first_step, 0.0, "header", dict(context.header))

    def write(self, line: StepLine | EventLine) -> None:
        """Scalars of a step, or an event as text."""
        if isinstance(line, EventLine):
            self._text(line.step, line.time, f"event/{line.event}", line.fields)
            return
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in line.values.items()
            if value is not None
        ]
        self._writer.add_event(self._event(wall_time=line.time, step=line.step, summary=self._summary(value=values)))

    def close(self, status: str) -> None:
        """Write the file out; ``status`` is in the events already."""
        self._writer.close()

    def _text(self, step: int, time: float, tag: str, content: dict[str, Any]) -> None:
        text = "    " + json.dumps(content, indent=2, default=str).replace("\n", "\n    ")
        tensor = self._tensor(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=self._shape(dim=[self._shape.Dim(size=1)]),
        )
        metadata = self._text_metadata(display_name=tag, description="")
        value = self._summary.Value(tag=tag, tensor=tensor, metadata=metadata)
        self._writer.add_event(self._event(wall_time=time, step=step, summary=self._summary(value=[value])))
