"""``paceline signal``: ask a run that trains for a checkpoint, or to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from paceline.cli import command
from paceline.errors import RunDirectoryError

DESCRIPTION = """Ask a run that is being trained on this machine for something, without ending it.

checkpoint writes one after the open step; where evaluate.device is set, it is decoded with as every other one. stop
finishes the open step, writes a checkpoint and ends, as Ctrl-C does.

Examples:
  paceline signal runs/first checkpoint
  paceline signal runs/first stop
"""


@dataclass
class Arguments:
    """Which run, and what it is to do."""

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of the run."""
    wish: Annotated[Literal["checkpoint", "stop"], tyro.conf.Positional]
    """What it is to do."""


def run(argv: Sequence[str]) -> int:
    """Send the signal; say to whom."""
    arguments, _ = command.parse(Arguments, argv, prog="paceline signal", description=DESCRIPTION)
    from paceline.checkpoint.run_directory import read_run_facts
    from paceline.checkpoint.run_lock import trainer_of

    read_run_facts(arguments.run)
    trainer = trainer_of(arguments.run)
    if not trainer:
        why = "nobody trains it on this machine" if trainer is None else "it is not known which process trains it"
        raise RunDirectoryError(f"{arguments.run}: {why}; see `paceline status {arguments.run}`")
    os.kill(trainer, signal.SIGUSR1 if arguments.wish == "checkpoint" else signal.SIGTERM)
    command.stdout.print(f"asked process {trainer}: {arguments.wish} after the open step", markup=False)
    return 0
