"""Real decoding while training goes on: a separate process on the evaluator device measures checkpoints as they come.

It reads the newest checkpoint's weights from the disk and decodes the held-out prompts with them. Checkpoints that come
while it is busy are passed over for the newest. Training never waits for it but at its end, within a bound, and goes on
without it when it fails.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint import checkpoints, run_directory
from paceline.config import DataConfig, EvaluateConfig, Settings, TargetConfig
from paceline.data.files import find_files
from paceline.data.holdout import heldout_files
from paceline.errors import ConfigError, DataError
from paceline.pipeline.messages import Failed, Ready, Reply
from paceline.pipeline.process import Stage, WorkerProcess
from paceline.pipeline.telemetry import RemoteObserver

if TYPE_CHECKING:
    from paceline.observe.observer import Observer
    from paceline.run.run import Run

NICENESS = 10
"""On a shared CPU the evaluator has a lower priority than the stages of training."""


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """For the evaluator: decode with the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """From the evaluator.

    Attributes:
        step: of the checkpoint.
        seconds: that it took.
        report: an `EvaluationReport` as plain values.
    """

    step: int
    seconds: float
    report: dict[str, Any]


class EvaluatorStage(Stage):
    """Work of the evaluator's process.

    Args:
        target, data, limits: of the run's settings, with the held-out files named.
        run_dir: the run.
        taps: of the drafter.
    """

    def __init__(
        self, target: TargetConfig, data: DataConfig, limits: EvaluateConfig, run_dir: Path, taps: list[int]
    ) -> None:
        from paceline.evaluate.evaluator import Evaluator

        self._run_dir = run_dir
        self._evaluator = Evaluator(target, data, limits, taps, limits.device or "cpu")

    def handle(self, message: Any) -> Iterator[EvalResult]:
        """Measure the newest checkpoint."""
        from paceline.drafter.network import Drafter
        from paceline.drafter.spec import DrafterSpec

        began = time.perf_counter()
        values, state, step = self._newest()
        network = Drafter(DrafterSpec.from_dict(values))
        network.load_state_dict(state)
        report = self._evaluator.measure(network, check_lossless=False).to_json()
        yield EvalResult(step, time.perf_counter() - began, report)

    def _newest(self) -> tuple[dict[str, Any], dict[str, Any], int]:
        """The newest checkpoint's drafter; one that is pruned while it is read has been followed by a newer one."""
        while True:
            step = checkpoints.newest_step(self._run_dir)
            try:
                return checkpoints.load_drafter(self._run_dir, step)
            except OSError:
                if checkpoints.newest_step(self._run_dir) == step:
                    raise


def start_evaluator(
    target: TargetConfig, data: DataConfig, limits: EvaluateConfig, run_dir: Path, taps: list[int]
) -> EvaluatorStage:
    """The stage, in its own process; arguments as for `EvaluatorStage`."""
    if limits.device == "cpu":
        os.nice(NICENESS)
    return EvaluatorStage(target, data, limits, run_dir, taps)


class EvalWorker:
    """The parent's side.

    Args:
        run: which run.
        observer: gets what was measured.
        stop_requested: whether the user wants to stop; then nothing is waited for.
    """

    def __init__(self, run: Run, observer: Observer | RemoteObserver, stop_requested: Callable[[], bool]) -> None:
        settings, flow = run.settings, run.settings.flow
        self._run, self._observer, self._stop_requested = run, observer, stop_requested
        heldout = heldout_files(settings.data.heldout, settings.store_path)
        data = settings.data.model_copy(update={"heldout": heldout})
        try:
            known = [entry["step"] for entry in run_directory.read_evaluations(run.run_dir)]
        except OSError as error:
            known = []
            observer.warn(str(error))
        self._seen = max((step for step in known if step <= run.first_step), default=0)
        self._busy = False
        self._worker: WorkerProcess | None = WorkerProcess(
            f"evaluator ({settings.evaluate.device})",
            start_evaluator,
            (settings.target, data, settings.evaluate, run.run_dir, list(run.taps)),
            device=settings.evaluate.device or "cpu",
            threads=flow.threads,
        )

    def look(self) -> None:
        """Take in what was measured, hand over the newest checkpoint; never waits."""
        self._receive()
        worker = self._worker
        if worker is not None and worker.ready and not self._busy and self._behind:
            self._busy = True
            worker.send(EvalRequest())

    def finish(self) -> None:
        """Wait for the measurement of the last checkpoint, for `evaluate.wait_s` at most."""
        limit_s = self._run.settings.evaluate.wait_s
        deadline = time.monotonic() + limit_s
        self.look()
        if self._pending:
            self._observer.note(f"waiting for the evaluator's last measurement, at most {limit_s:g} s")
        while (worker := self._worker) is not None and self._pending and not self._stop_requested():
            left = deadline - time.monotonic()
            if left <= 0:
                self._observer.warn(
                    f"the last checkpoint was not decoded within evaluate.wait_s = {limit_s:g}; make up for it "
                    f"with: paceline evaluate {self._run.run_dir}"
                )
                return
            wait([worker.connection, worker.process.sentinel], timeout=min(left, 0.2))
            self.look()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._worker is not None:
            self._worker.stop(0.0)
            self._worker = None

    @property
    def _behind(self) -> bool:
        """Whether there is a checkpoint that was not measured."""
        return checkpoints.newest_step(self._run.run_dir) > self._seen

    @property
    def _pending(self) -> bool:
        return self._worker is not None and (self._busy or self._behind)

    def _receive(self) -> None:
        while (worker := self._worker) is not None:
            try:
                if not worker.connection.poll():
                    if not worker.process.is_alive():
                        self._lose(worker.death())
                    return
                reply: Reply = worker.connection.recv()
            except (EOFError, OSError):
                self._lose(worker.death())
                return
            if reply.memory is not None:
                self._observer.gauge("memory_peak/evaluator_bytes", reply.memory[0])
                if reply.memory[1]:
                    self._observer.gauge("memory_peak/evaluator_gpu_bytes", reply.memory[1])
            if isinstance(reply.payload, Ready):
                worker.ready = True
            elif isinstance(reply.payload, Failed):
                self._lose(f"failed: {reply.payload.error}")
            else:
                self._busy = False
                self._take(reply.payload, reply.ended_s)

    def _take(self, found: EvalResult, ended_s: float) -> None:
        """Write down a measurement."""
        self._seen = max(self._seen, found.step)
        values = decode_values(found)
        for name, value in values.items():
            self._observer.gauge(name, value)
        name = f"checkpoint of step {found.step}"
        self._observer.span("evaluator", "work", name, ended_s - found.seconds, ended_s)
        self._observer.event("decoded", step=found.step, values=values)
        report = found.report
        training = "" if report["training_tau"] is None else f"; training forward {report['training_tau']:.2f}"
        self._observer.note(
            f"decoding {report['num_prompts']} held-out prompts with the drafter of step {found.step}: "
            f"τ {report['tau_micro']:.2f}{training}"
        )
        if report["training_agrees"] is False:
            self._observer.warn(
                f"at step {found.step} the training forward gives τ {report['training_tau']:.3f} on the decoded "
                f"blocks and the decode loop {report['tau_micro']:.3f}: more than 2 % apart"
            )
        # The answers themselves are kept of the last checkpoint only: the file is written anew each time.
        rows = report["rows"] if found.step == self._run.plan.total_steps else []
        try:
            run_directory.add_evaluation(self._run.run_dir, found.step, {**report, "rows": rows})
        except OSError as error:
            reason = error.strerror or str(error).partition(": ")[2] or str(error)
            self._observer.warn(
                f"{self._run.run_dir / run_directory.EVALUATION}: not written ({reason}); the report lacks this value"
            )

    def _lose(self, how: str) -> None:
        self.close()
        self._observer.warn(f"the evaluator {how}; training continues without real decoding")


def decode_values(found: EvalResult) -> dict[str, float]:
    """A measurement under the names of the metric catalogue."""
    report = found.report
    values: dict[str, float | None] = {
        "decode/tau": report["tau_micro"],
        "decode/tau_macro": report["tau_macro"],
        "decode/training_tau": report["training_tau"],
        "decode/control_tau": report["control_tau"],
        **{f"decode/slot_{rate['slot']}": rate["conditional"] for rate in report["slots"]},
        "decode/step": found.step,
        "decode/seconds": found.seconds,
    }
    return {name: value for name, value in values.items() if value is not None}


@contextlib.contextmanager
def background_evaluation(
    run: Run, observer: Observer | RemoteObserver, stop_requested: Callable[[], bool]
) -> Generator[EvalWorker | None]:
    """Real decoding beside a run, on its first machine, where its settings ask for it; its process ends with this."""
    if run.settings.evaluate.device is None or not run.nodes.first:
        yield None
        return
    worker = EvalWorker(run, observer, stop_requested)
    try:
        yield worker
    finally:
        worker.close()


def check_background_evaluation(settings: Settings) -> None:
    """Refuse an evaluator device without prompts; needs the store.

    Raises:
        PacelineError: one line.
    """
    if settings.evaluate.device is None:
        return
    heldout = heldout_files(settings.data.heldout, settings.store_path)
    if not heldout:
        raise ConfigError(
            f"evaluate.device = {settings.evaluate.device!r}: there are no held-out prompts to decode; give "
            "data.heldout or data.heldout_share, or leave it unset"
        )
    try:
        find_files(heldout, "data.heldout")
    except DataError as error:
        raise ConfigError(*error.errors) from None
