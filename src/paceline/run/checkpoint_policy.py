"""When checkpoints are due, what they note beside the state, and the drafter folder that goes with each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.checkpoint import checkpoints
from paceline.checkpoint.best import HELD_OUT_TAU, note_of
from paceline.checkpoint.checkpoints import DECODED, CheckpointWriter, export_path
from paceline.checkpoint.retention import DECODE, VALIDATION, Best
from paceline.checkpoint.run_files import RunFiles
from paceline.config import Settings, TargetConfig
from paceline.drafter.spec import DrafterSpec
from paceline.errors import ConfigError, ExportError, MetricError, RunDirectoryError
from paceline.observe.catalogue import find
from paceline.types import TargetFacts

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.export.exporter import Format, TargetInput
    from paceline.run.run import Run
    from paceline.types import PlannedStep

PATIENCE_S = 20.0
"""An error elsewhere ends the run this much later at most, where a checkpoint is being written."""


class Metrics(Protocol):
    """What is known of a run so far."""

    def event(self, kind: str, **fields: Any) -> None:
        """Write down something that happened, and everything before it."""
        ...

    def newest(self, name: str) -> tuple[int, float] | None:
        """Step and value of a metric where it was written down last."""
        ...

    def lost(self) -> str | None:
        """What somebody has done to the file of the metrics; None where it is as it must be."""
        ...


class CheckpointPolicy:
    """Says when the state is written and what is noted with it; one a run, in the parent.

    Args:
        run: which run.
        metrics: gets every checkpoint before it is written, so that no checkpoint is ahead of the metrics on disk.
        clock: seconds, ascending.
    """

    def __init__(self, run: Run, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._metrics, self._clock = run, metrics, clock
        self._since, self._last, self._note = clock(), run.first_step, {}
        self._files = RunFiles.of(run.run_dir)
        self._lost: str | None = None
        self._asked = False

    def ask(self) -> None:
        """A checkpoint is due after the open step."""
        self._asked = True

    def due(self, planned: PlannedStep) -> bool:
        """Where the plan says so, when it was asked for, and when `checkpoint.every_minutes` have gone by."""
        minutes = self._run.settings.checkpoint.every_minutes
        return planned.save or self._asked or (minutes is not None and self._clock() - self._since >= 60 * minutes)

    def announce(self, step: int) -> Mapping[str, Any]:
        """Has everything up to the step written down; the place in the plan and the metrics that the best is found by.

        A metric counts for the first checkpoint after it was measured; one that was not measured since the checkpoint
        before is not noted.
        """
        if step == self._last:
            return self._note
        self._metrics.event("checkpoint", step=step)
        self._lost = self._metrics.lost()
        steps, best = self._run.steps, best_of(self._run.settings.checkpoint.keep_best)
        names = [HELD_OUT_TAU.metric, *([best.metric] if best is not None else [])]
        known = {name: self._metrics.newest(name) for name in names if not name.startswith(DECODE)}
        at = step - steps[0].step
        values = {name: found[1] for name, found in known.items() if found is not None and found[0] > self._last}
        self._note = {
            "epoch": steps[at].epoch,
            "window": steps[at].window,
            "micro_batches": sum(len(planned.batches) for planned in steps[: at + 1]),
            **note_of(best, values),
        }
        self._since, self._last, self._asked = self._clock(), step, False
        return self._note

    def check(self) -> None:
        """Called when the checkpoint that was announced has been handed over for writing.

        Raises:
            RunDirectoryError: the file of the metrics is not the one that the run writes.
        """
        if self._lost is not None and self._files.lost() is None:  # else the writer says so
            raise RunDirectoryError(
                f"{self._lost}; the checkpoint of step {self._last} is kept, run the same command to resume"
            )


@dataclass(frozen=True)
class CheckpointExporter:
    """Writes the drafter folder of a checkpoint, as `paceline export` does; pickles.

    Attributes:
        target, run_dir, spec: of the run.
        format: of the folder.
    """

    target: TargetConfig
    format: Format
    run_dir: Path
    spec: DrafterSpec

    @cached_property
    def _given(self) -> TargetInput:
        """Read once, in the process that writes."""
        from paceline.export.exporter import target_input

        return target_input(self.target)

    def __call__(self, step: int, network: Mapping[str, Tensor]) -> None:
        """Write ``export/step-NUMBER``, in bfloat16, verified; it appears whole."""
        from paceline.export.exporter import TrainedDrafter, export_drafter, origin_of_run

        folder = export_path(self.run_dir, step)
        drafter = TrainedDrafter(self.spec, network, self.target, origin_of_run(self.run_dir, step))
        try:
            export_drafter(drafter, folder, format=self.format, golden="none", given=self._given)
        except OSError as error:
            raise ExportError(
                f"{folder}: drafter folder not written ({error.strerror or error}); the checkpoint of step {step} is "
                "whole; make room and run the same command to go on"
            ) from error


def checkpoint_writer(run: Run) -> CheckpointWriter:
    """The writer of a run's checkpoints; pickles, for the process that writes them."""
    config = run.settings.checkpoint
    export = None
    if config.export != "none":
        export = CheckpointExporter(run.settings.target, config.export, run.run_dir, run.spec)
    return CheckpointWriter(run.run_dir, config, best=best_of(config.keep_best), export=export)


def await_written(run_dir: Path, known: set[str], is_alive: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    """After an error elsewhere: let the checkpoint that is being written take its name.

    Args:
        run_dir: the run.
        known: what lay there half-written before the run was started, and will stay so.
        is_alive: whether the process that writes still runs.
        limit_s: no longer than this.
    """
    deadline = time.monotonic() + limit_s
    while checkpoints.being_written(run_dir) - known and is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)


def best_of(metric: str | None) -> Best | None:
    """How the best checkpoint by a metric is found.

    Raises:
        ConfigError: no such metric, or neither less nor more of it is better.
    """
    if metric is None:
        return None
    try:
        find(metric)
        better = find(metric.removeprefix(VALIDATION)).better
    except MetricError:
        raise ConfigError(
            f"checkpoint.keep_best = {metric!r}: no metric of the catalogue (docs/metrics.md); for example "
            "validation/loss or tau"
        ) from None
    if metric.startswith(DECODE) and metric not in DECODED:
        raise ConfigError(f"checkpoint.keep_best = {metric!r}: of decoding, {' or '.join(DECODED)} can be used")
    if better == "":
        raise ConfigError(
            f"checkpoint.keep_best = {metric!r}: neither less nor more of it is better; for example validation/loss"
        )
    return Best(metric, better)


def check_saving(settings: Settings, spec: DrafterSpec, facts: TargetFacts, validates: bool) -> None:
    """Refuse what could never be kept or exported.

    Args:
        settings, spec, facts: of the run.
        validates: whether there are held-out samples to measure on.

    Raises:
        PacelineError: one line.
    """
    from paceline.export.compatibility import check_mask
    from paceline.export.speculators import speculators_config
    from paceline.export.zlab import zlab_config

    config = settings.checkpoint
    best_of(config.keep_best)
    if config.keep_best is not None and config.keep_best.startswith(VALIDATION) and not validates:
        raise ConfigError(
            f"checkpoint.keep_best = {config.keep_best!r}: is never measured without held-out samples; give "
            "data.heldout or data.heldout_share, and evaluate.validation_samples above 0"
        )
    if config.keep_best in DECODED and settings.evaluate.device is None:
        raise ConfigError(
            f"checkpoint.keep_best = {config.keep_best!r}: is measured by the evaluator alone; set "
            "evaluate.device, or use validation/loss"
        )
    if config.export == "none":
        return
    try:
        check_mask("drafter", spec)
        if config.export == "zlab":
            zlab_config(spec, "bfloat16")
        else:
            speculators_config(spec, facts, "bfloat16")
    except ExportError as error:
        raise ConfigError(*(f"checkpoint.export = {config.export}: {line}" for line in error.errors)) from error
