"""``paceline status``: where a run is, from its files; the run itself notices nothing of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro
from rich.live import Live
from rich.text import Text

from paceline.cli import command
from paceline.errors import RunDirectoryError
from paceline.text import duration, fixed, short

if TYPE_CHECKING:
    from paceline.checkpoint.best import BestCheckpoint

DESCRIPTION = """Say where a run is: whether it trains, its step, time left, newest numbers, last warnings, checkpoints.

Examples:
  paceline status runs/first
  paceline status runs/first --watch
  paceline status runs/first --json | jq .step
"""
WATCH_S = 2.0
NUM_WARNINGS = 3


@dataclass
class Arguments:
    """Which run, and how it is shown."""

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of the run."""
    watch: bool = False
    """Renew it every two seconds, until nobody trains the run or Ctrl-C."""
    json: bool = False
    """Print JSON; with --watch one line a renewal."""


@dataclass(frozen=True)
class RunStatus:
    """Where a run is; None for what is not known.

    Attributes:
        run: its directory.
        state: ``training``, ``not trained`` (killed, or it could not write its end), or how it ended.
        pid: of the trainer; 0 where another machine trains it.
        step, total_steps, epoch, epochs: done, planned; epochs are 1-based.
        time_left_s, idle_s: at the recent speed; since the newest line.
        loss, tau, held_out_tau, real_tokens_per_s: the newest ones.
        checkpoint, next_checkpoint: steps.
        best_checkpoint: of those that are kept.
        warnings: the last ones, newest last.
    """

    run: str
    state: str
    pid: int | None
    step: int
    total_steps: int | None
    epoch: int | None
    epochs: int | None
    time_left_s: float | None
    idle_s: float | None
    loss: float | None
    tau: float | None
    held_out_tau: float | None
    real_tokens_per_s: float | None
    checkpoint: int
    next_checkpoint: int | None
    best_checkpoint: BestCheckpoint | None
    warnings: list[str]


def run(argv: Sequence[str]) -> int:
    """Show it once, or until the run ends."""
    arguments, _ = command.parse(Arguments, argv, prog="paceline status", description=DESCRIPTION)
    found = read_status(arguments.run)
    if arguments.json:
        while True:
            indent = None if arguments.watch else 2
            sys.stdout.write(json.dumps(asdict(found), indent=indent) + "\n")
            sys.stdout.flush()
            if not arguments.watch or found.state != "training":
                return 0
            found = _later(arguments.run)
    if not arguments.watch:
        command.stdout.print(render(found))
        return 0
    with Live(render(found), console=command.stdout, auto_refresh=False) as live:
        while found.state == "training":
            found = _later(arguments.run)
            live.update(render(found), refresh=True)
    return 0


def _later(run_dir: Path) -> RunStatus:
    time.sleep(WATCH_S)
    return read_status(run_dir)


def read_status(run_dir: Path) -> RunStatus:
    """Where a run is.

    Raises:
        RunDirectoryError: no run in there.
    """
    from paceline.checkpoint.best import best_checkpoint
    from paceline.checkpoint.checkpoints import newest_step
    from paceline.checkpoint.run_directory import is_run_directory, read_evaluations
    from paceline.checkpoint.run_lock import trainer_of
    from paceline.observe.metrics_file import METRICS_FILE, newest_lines
    from paceline.observe.run_history import assemble, read_settings

    if not is_run_directory(run_dir):
        raise RunDirectoryError(f"{run_dir}: not a run directory; give the directory of a run, for example runs/first")
    path, pid = run_dir / METRICS_FILE, trainer_of(run_dir)
    # Read without the schema, so that a run of another version can be asked too.
    settings = read_settings(run_dir, [])
    history = assemble(run_dir, newest_lines(path) if path.exists() else [], settings=settings)
    step = int(history.steps[-1]) if history.steps.size else 0
    total = history.total_steps or None
    every, checkpoint = history.setting("checkpoint", "every_steps"), newest_step(run_dir)
    newest = {name: _newest(history.series(name)) for name in ("loss", "tau", "real_tokens_per_s", "validation/tau")}
    evaluations = read_evaluations(run_dir)
    validated = newest["validation/tau"]
    idle_s = time.time() - float(history.times[-1]) if history.steps.size else None
    left_s = _newest(history.series("progress/time_left_s"))
    training = pid is not None
    ended = "not trained" if history.status == "not closed" else history.status
    warnings = [str(event.fields.get("text")) for event in history.events if event.event == "warning"]
    return RunStatus(
        run=str(run_dir),
        state="training" if training else ended,
        pid=pid,
        step=step,
        total_steps=total,
        epoch=int(history.epochs[-1]) + 1 if history.steps.size else None,
        epochs=history.setting("train", "epochs"),
        time_left_s=max(left_s - (idle_s or 0.0), 0.0) if training and left_s is not None else None,
        idle_s=idle_s,
        loss=newest["loss"],
        tau=newest["tau"],
        held_out_tau=evaluations[-1]["tau_micro"] if evaluations else validated,
        real_tokens_per_s=newest["real_tokens_per_s"],
        checkpoint=checkpoint,
        next_checkpoint=min((step // every + 1) * every, total) if training and total and every else None,
        best_checkpoint=best_checkpoint(run_dir),
        warnings=warnings[-NUM_WARNINGS:],
    )


def _newest(values: np.ndarray) -> float | None:
    """The newest value that is a number."""
    good = values[np.isfinite(values)]
    return float(good[-1]) if good.size else None


def render(found: RunStatus) -> Text:
    """A few lines for a terminal."""
    state = {"training": "green", "finished": "green"}.get(found.state, "bold yellow")
    of = f" of {found.total_steps}" if found.total_steps else ""
    place = [f"step {found.step}{of}"]
    place += [f"epoch {found.epoch} of {found.epochs}"] if found.epoch is not None else []
    place += [f"{duration(found.time_left_s)} left"] if found.time_left_s is not None else []
    place += [f"last line {duration(found.idle_s)} ago"] if found.idle_s is not None else []
    numbers = [f"loss {fixed(found.loss, 3)}", f"τ {fixed(found.tau)}", f"held-out τ {fixed(found.held_out_tau)}"]
    numbers += [f"{short(found.real_tokens_per_s)} real tokens/s"]
    following = f", next at step {found.next_checkpoint}" if found.next_checkpoint is not None else ""
    text = Text.assemble(f"{found.run}: ", (found.state, state), f" (pid {found.pid})" if found.pid else "")
    best = f", best: {found.best_checkpoint}" if found.best_checkpoint is not None else ""
    for line in (" · ".join(place), " · ".join(numbers), f"checkpoint of step {found.checkpoint}{following}{best}"):
        text.append(f"\n  {line}")
    for warning in found.warnings:
        text.append_text(Text.assemble("\n  ", ("warning: ", "bold yellow"), warning))
    return text
