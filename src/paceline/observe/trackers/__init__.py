"""Mirrors by name. Each backend runs in a process of its own (`isolated`), which imports its package only there."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.config import ObserveConfig
from paceline.observe.metrics_file import EventLine, StepLine


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink needs to start.

    Attributes:
        settings: of the run.
        run_dir: directory of the run.
        header: facts of the run as given by the trainer.
        first_step: step of the checkpoint that the run goes on from, 0 for a new run.
    """

    settings: ObserveConfig
    run_dir: Path
    header: Mapping[str, Any]
    first_step: int


class Backend(Protocol):
    """What a tracker's package is wrapped in; made, used and closed on one thread of one process."""

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
"""Module by name; its ``start(context)`` opens the backend."""


def open_backend(name: str, context: SinkContext) -> Backend:
    """Start a backend in this process.

    Raises:
        TrackerError: it says itself why it cannot start; other exceptions are its package's.
    """
    return importlib.import_module(BACKENDS[name]).start(context)


def wanted(settings: ObserveConfig) -> list[str]:
    """Names of the mirrors that the settings ask for."""
    asked = {"wandb": settings.wandb != "off", "tensorboard": settings.tensorboard, "trackio": settings.trackio}
    return [name for name, on in asked.items() if on]
