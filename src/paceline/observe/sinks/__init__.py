"""Mirrors by name: each entry opens one sink, importing its package only then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import ObserveConfig
from paceline.observe.mirror import Sink


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


def _wandb(context: SinkContext) -> Sink:
    from paceline.observe.sinks.wandb_sink import WandbSink

    return WandbSink(context)


SINKS: dict[str, Callable[[SinkContext], Sink]] = {"wandb": _wandb}


def wanted(settings: ObserveConfig) -> list[str]:
    """Names of the mirrors that the settings ask for."""
    asked = {"wandb": settings.wandb != "off", "tensorboard": settings.tensorboard, "trackio": settings.trackio}
    return [name for name, on in asked.items() if on]
