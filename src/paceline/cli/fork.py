"""``paceline fork``: a new run from a checkpoint of another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.cli import command

DESCRIPTION = """Make a new run that continues from a checkpoint of another one.

It has the weights, the optimizer state, the step and the place in the epoch of that checkpoint, and its own settings
from there on. The old run stays as it is; the new one reads its store.

Data and shape may be others too: then the new run begins at that step with an epoch of its own, and has those weights
and moments whose shapes are its own.

Examples:
  paceline fork runs/first --out runs/gentle --optimizer.lr 1e-4
  paceline fork runs/first --step 400 --out runs/mixed --plan.weights "{code: 2.0}"
  paceline fork runs/first --out runs/newer --data.train '[newer.jsonl]'
  paceline train runs/gentle
"""


@dataclass
class Arguments:
    """What to fork, from where."""

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of the run."""
    out: Path
    """Directory of the new run."""
    step: int | None = None
    """Checkpoint to begin with. Unset: the newest."""
    best: bool = False
    """Begin with the best checkpoint by checkpoint.keep_best, or where that is unset by held-out τ."""


def run(argv: Sequence[str]) -> int:
    """Make the directory; say what changes, and what comes next."""
    arguments, overrides = command.parse(Arguments, argv, prog="paceline fork", description=DESCRIPTION, settings=True)
    from paceline.checkpoint.checkpoints import newest_step
    from paceline.checkpoint.run_directory import read_run_settings
    from paceline.run.fork import fork_run

    settings = read_run_settings(arguments.run, overrides)
    step = command.step_of_run(arguments.run, arguments.step, best=arguments.best)
    step = newest_step(arguments.run) if step is None else step
    for line in fork_run(arguments.run, settings.model_copy(update={"run_dir": str(arguments.out)}), step):
        command.stderr.print(line, markup=False)
    command.stdout.print(f"{arguments.out}: forked from step {step} of {arguments.run}", markup=False)
    command.stdout.print(f"next: paceline train {arguments.out}", markup=False)
    return 0
