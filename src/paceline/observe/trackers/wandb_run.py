"""Tracker: Weights & Biases: offline by default, online on request, one W&B run however often the run resumes."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import TrackerError
from paceline.observe.catalogue import CATALOGUE
from paceline.observe.metrics_file import EventLine, StepLine

if TYPE_CHECKING:
    from paceline.observe.trackers import TrackerContext


class WandbRun:
    """One W&B run whose x axis is the optimizer step; metrics are grouped by the part of their name before the slash.

    Args:
        context: settings, directory and header of the run.

    Raises:
        TrackerError: the package is missing, or online was asked for without a key.
    """

    def __init__(self, context: TrackerContext) -> None:
        try:
            import wandb
        except ImportError as error:
            raise TrackerError(
                "observe.wandb is on, its package is missing; pip install 'paceline[wandb]' or set observe.wandb: off"
            ) from error
        settings = context.settings
        if settings.wandb == "online":
            _need_key()
        folder = context.run_dir / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=settings.wandb_project,
            entity=settings.wandb_entity,
            name=context.run_dir.resolve().name,
            id=_run_id(folder / "run-id"),
            resume="allow",
            dir=str(context.run_dir),
            mode=settings.wandb if settings.wandb == "online" else "offline",
            config=_plain(dict(context.header)),
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=settings.tracker_start_limit_s,
                disable_git=True,
                save_code=False,
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        for metric in CATALOGUE:
            if metric.better and "{" not in metric.name:
                summary = "min" if metric.better == "lower" else "max"
                self._run.define_metric(metric.name, step_metric="step", summary=f"{summary},last")

    def write(self, line: StepLine | EventLine) -> None:
        """A step line becomes one history row; a warning becomes an entry of the run's summary."""
        if isinstance(line, StepLine):
            self._run.log({"step": line.step, **{k: v for k, v in line.values.items() if v is not None}})
        else:
            self._run.summary.update({f"event/{line.event}": {"step": line.step, **_plain(line.fields)}})

    def close(self, status: str) -> None:
        """Finish the W&B run; anything but ``finished`` is marked as failed."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _need_key() -> None:
    """W&B would ask on the terminal for a missing key; a run that waits for an answer is a run that hangs."""
    import wandb

    try:
        known = bool(wandb.Api().api_key)
    except wandb.errors.UsageError:
        known = False
    if not known:
        raise TrackerError(
            "observe.wandb = online needs a key; run `wandb login`, or set observe.wandb: offline and sync later"
        )


def _run_id(path: Path) -> str:
    """The id of this run directory's W&B run, made at its first start."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8").strip()
    name = secrets.token_hex(4)
    path.write_text(name + "\n", encoding="utf-8")
    return name


def _plain(value: Any) -> Any:
    """Only what W&B's configuration can hold: text, numbers, lists, mappings."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


start = WandbRun
