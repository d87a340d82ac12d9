"""Trackers that the metrics are also sent to: W&B, TensorBoard, trackio.

In come the lines of metrics.jsonl; each tracker's package runs in a separate process (`tracker_process`), which is
the only one that imports it. A tracker that cannot start stops the run before any work; one that fails or hangs later
costs a warning, never the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.config import ObserveConfig
from paceline.observe.metrics_file import EventLine, StepLine


@dataclass(frozen=True, slots=True)
class TrackerContext:
    """What a tracker needs to start.

    Attributes:
        settings: of the run.
        run_dir: directory of the run.
        header: facts of the run as given by the trainer.
        first_step: step of the checkpoint that the run resumes from, 0 for a new run.
    """

    settings: ObserveConfig
    run_dir: Path
    header: Mapping[str, Any]
    first_step: int


class TrackerBackend(Protocol):
    """What a tracker's package is wrapped in; made, used and closed in the tracker's process."""

    def write(self, line: StepLine | EventLine) -> None:
        """Take one line."""
        ...

    def close(self, status: str) -> None:
        """No more lines; ``status`` is how the run ended."""
        ...


BACKENDS: dict[str, str] = {
    "wandb": "paceline.observe.trackers.wandb_run",
    "tensorboard": "paceline.observe.trackers.tensorboard_events",
    "trackio": "paceline.observe.trackers.trackio_run",
}
"""Module by name; its ``start(context)`` gives the `TrackerBackend`."""


def wanted(settings: ObserveConfig) -> list[str]:
    """Names of the trackers that the settings ask for."""
    asked = {"wandb": settings.wandb != "off", "tensorboard": settings.tensorboard, "trackio": settings.trackio}
    return [name for name, on in asked.items() if on]
