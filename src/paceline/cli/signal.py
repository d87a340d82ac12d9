"""``paceline signal``: ask a run that trains for a checkpoint, to decode it, or to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from paceline.cli import command
from paceline.errors import ConfigError, RunDirectoryError

DESCRIPTION = """Ask a run that is being trained on this machine for something, without ending it.

checkpoint writes one after the open step. evaluate does too, and the run's evaluator (evaluate.device) decodes held-out
prompts with it next. stop finishes the open step, writes a checkpoint and ends, as Ctrl-C does.

SIGHUP asks for a checkpoint as well; a run that writes to a terminal stops in order when that is closed.

Examples:
  paceline signal runs/first checkpoint
  paceline signal runs/first evaluate
  paceline signal runs/first stop
"""


@dataclass
class Arguments:
    """Which run, and what it is to do."""

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of the run."""
    wish: Annotated[Literal["checkpoint", "evaluate", "stop"], tyro.conf.Positional]
    """What it is to do."""


def run(argv: Sequence[str]) -> int:
    """Send the signal; say to whom."""
    arguments, _ = command.parse(Arguments, argv, prog="paceline signal", description=DESCRIPTION)
    from paceline.checkpoint.run_directory import read_run_facts, read_run_settings
    from paceline.checkpoint.run_lock import trainer_of

    read_run_facts(arguments.run)
    if arguments.wish == "evaluate" and read_run_settings(arguments.run).evaluate.device is None:
        raise ConfigError(
            f"{arguments.run}: evaluate.device is unset, so nothing decodes beside this run; `paceline evaluate "
            f"{arguments.run}` decodes with its newest checkpoint"
        )
    trainer = trainer_of(arguments.run)
    if not trainer:
        why = "nobody trains it on this machine" if trainer is None else "it is not known which process trains it"
        raise RunDirectoryError(f"{arguments.run}: {why}; see `paceline status {arguments.run}`")
    os.kill(trainer, signal.SIGTERM if arguments.wish == "stop" else signal.SIGUSR1)
    command.stdout.print(f"asked process {trainer}: {arguments.wish} after the open step", markup=False)
    return 0
