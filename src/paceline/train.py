"""Read first: builds the parts of a run, joins them, takes its optimizer steps, and ends them in order.

    store ─► plan ─► host batches ─► target ─► features ─► drafter ─► checkpoint
                     every StepReport ─► observer

`run/build.py` turns settings into a `Run`: everything that is known, and refused, before a model loads. `train` takes
its steps with one of two engines: `inline`, the stages one after another in this process (the reference), or
`pipeline`, one process a role, joined by the coordinator. Both give the same weights, bit for bit, where delivery is
ordered. An engine yields the learner's report of each step with the step's times; everything else is here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.atomic_files import write_text
from paceline.checkpoint import checkpoints, run_directory
from paceline.checkpoint.changes import read_changes
from paceline.config import tasks_in_flight
from paceline.device import deterministic_algorithms, device_errors, own_device
from paceline.errors import NOT_TRAINED, Interrupted, PacelineError, StageError
from paceline.observe.observer import Observer, open_observer
from paceline.pipeline.coordinator import Coordinator, Work
from paceline.pipeline.messages import batch_name
from paceline.pipeline.multinode import rank_groups
from paceline.pipeline.prefetch import Prefetcher
from paceline.pipeline.process import WorkerProcess
from paceline.pipeline.profiler import PROFILE_FILE, StepProfile, clear_profile
from paceline.pipeline.signals import GracefulStop
from paceline.pipeline.telemetry import PeakMemory, RemoteObserver
from paceline.run.build import feature_pool
from paceline.run.checkpoint_policy import CheckpointPolicy, await_written, checkpoint_writer
from paceline.run.eval_worker import background_evaluation
from paceline.run.learner_factory import learner_factory
from paceline.run.run import Run
from paceline.run.step_metrics import StepMetrics
from paceline.types import FeatureBatch, HostBatch, PlannedStep, StepReport, StepTimes

if TYPE_CHECKING:
    from rich.console import Console

AnyObserver = Observer | RemoteObserver


@dataclass(frozen=True)
class Outcome:
    """How training ended.

    Attributes:
        step: optimizer steps that the newest checkpoint holds.
        total_steps: steps of the whole run.
        stopped: whether the user stopped it before the end.
    """

    step: int
    total_steps: int
    stopped: bool


def train(run: Run, *, notice: Callable[[str], None], console: Console | None = None) -> Outcome:
    """Train from where the run is to its end, or to where the user stops it.

    Args:
        run: from `build_run`.
        notice: called with what the user should know at once.
        console: where progress is shown; standard error if unset.

    Raises:
        StageError: a stage failed; started again, the run continues from its newest checkpoint.
        CheckpointError: a checkpoint could not be written.
    """
    first, total = run.nodes.first, run.plan.total_steps
    if not run.remaining:
        if first:
            checkpoints.read_checkpoint(run.run_dir, run.first_step)
        return Outcome(run.first_step, total, stopped=False)
    observer = _observer(run, console) if first else RemoteObserver()
    engine = _inline if run.settings.flow.mode == "inline" else _pipeline
    profiled, profile = run.settings.observe.profile_steps, run.run_dir / PROFILE_FILE
    if first:
        clear_profile(profiled, profile, run.first_step)
    last, status = run.first_step, "failed: unforeseen"
    try:
        _note_start(run, observer)
        completed, saves = StepMetrics(run), CheckpointPolicy(run, observer)
        with (
            GracefulStop(notice, saves.ask) as stop,
            background_evaluation(run, observer, stop) as evaluation,
            deterministic_algorithms(run.settings.train.deterministic),
        ):
            for report, times in engine(run, stop, observer, saves):
                stop.training = True
                if first:
                    observer.step(completed(report, times))
                last = report.step
                if evaluation is not None:
                    evaluation.look()
            if evaluation is not None and last == total:
                evaluation.finish()
        status = "finished" if last == total else "stopped"
        if profiled is not None and first:
            observer.note(f"profile of the steps: {profile}" if profile.exists() else "no step was profiled")
    except (KeyboardInterrupt, Interrupted):
        status = "interrupted"
        raise
    except PacelineError as error:
        status = f"failed: {error.errors[0]}"
        _log_failure(run, error, observer)
        raise
    finally:
        observer.close(status)
    return Outcome(checkpoints.newest_step(run.run_dir) if first else last, total, stopped=status == "stopped")


def _observer(run: Run, console: Console | None) -> Observer:
    plan = run.plan.epoch(run.remaining[0].epoch)
    header = {**run_directory.read_run_facts(run.run_dir), "bucket_edges": plan.edges.tolist()}
    if run.settings.plan.leftover != "carry":  # an epoch that hands samples on to the next has its own size
        header["samples_per_epoch"] = plan.num_samples
    return open_observer(
        run.settings.observe,
        run.run_dir,
        total_steps=run.plan.total_steps,
        header=header,
        first_step=run.first_step,
        console=console,
    )


def _note_start(run: Run, observer: AnyObserver) -> None:
    """What the user should know of the checkpoint that the run continues from, and which settings change there."""
    if not run.nodes.first:
        return
    changes = [] if run.change is None else [run.change]
    origin = run_directory.read_run_facts(run.run_dir).get("forked_from")
    if origin is not None and run.first_step == origin["step"]:
        observer.event("forked", **origin)
        changes = [change for change in read_changes(run.run_dir) if change.step == run.first_step]
    for change in changes:
        changed = {name: f"{before} → {after}" for name, (before, after) in change.changed.items()}
        observer.event("settings", **changed)
    if run.first_step not in checkpoints.steps(run.run_dir):
        return
    checkpoints.quarantine_after(run.run_dir, run.first_step)
    for text in run.damaged:
        observer.warn(text)
    before, now = checkpoints.read_note(run.run_dir, run.first_step)["versions"], run_directory.versions()
    changed = [f"{name} {before.get(name)} → {now[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        observer.warn(f"continues with other versions, so the last bits may differ: {', '.join(changed)}")


def _inline(
    run: Run, stop: Callable[[], bool], observer: AnyObserver, saves: CheckpointPolicy
) -> Iterator[tuple[StepReport, StepTimes]]:
    """All stages in this process, one after another."""
    from paceline.drafter.stage import BUILT, out_of_memory_in_step
    from paceline.drafter.stage import out_of_memory as drafter_memory
    from paceline.target_model.load import load_target
    from paceline.target_model.shared_weights import shared_weights
    from paceline.target_model.stage import LOADED
    from paceline.target_model.stage import out_of_memory as target_memory
    from paceline.target_model.tap_guard import guard_first_batch

    settings, steps, device = run.settings, run.remaining, run.settings.flow.drafter_devices[0]
    torch.set_num_threads(settings.flow.threads)
    own_device(device)
    with device_errors(StageError, lambda: f"stage target failed on start-up: {LOADED.format(device)}"):
        target = load_target(settings.target, run.taps, settings.flow.target_devices[0])
    weights = shared_weights(target, with_teacher=settings.objective.needs_teacher)
    with device_errors(StageError, lambda: f"stage drafter failed on start-up: {BUILT.format('the drafter is made')}"):
        learner = learner_factory(run)(weights)
    writer = checkpoint_writer(run)

    def tapped(host: HostBatch) -> FeatureBatch:
        with device_errors(StageError, lambda: _failed("target", host, target_memory(target, device, host))):
            return target.features(host, with_last=settings.objective.needs_teacher)

    def learn(work: Callable[[FeatureBatch], None], batch: FeatureBatch) -> None:
        with device_errors(StageError, lambda: _failed("drafter", batch.host, drafter_memory(learner, batch.host))):
            work(batch)

    def take_step(planned: PlannedStep) -> StepReport:
        with device_errors(StageError, lambda: f"stage drafter failed in a step: {out_of_memory_in_step(learner)}"):
            return learner.step(planned)

    for host in run.plan.largest_batches():
        learn(learner.probe, tapped(host))
    for host in run.plan.validation_batches(run.heldout):
        learner.hold_for_validation(tapped(host))
    if stop():
        raise Interrupted(NOT_TRAINED)
    batches = run.plan.host_batches(steps, run.local_ranks, run.num_ranks)
    profile, peaks, guarded = _profile(run), PeakMemory(device), False
    for planned in steps:
        timed = _Stopwatch(observer)
        profile.before(planned.step)
        for index in planned.batches:
            host = timed("feed", f"batch {index}", next, batches)
            features = timed("target", f"batch {index}", tapped, host)
            if not guarded:
                guard_first_batch(target, features)
                guarded = True
            timed("drafter", f"batch {index}", learn, learner.accumulate, features)
        report = timed("drafter", f"optimizer step {planned.step}", take_step, planned)
        stopping = stop()
        profile.after(planned.step, last=planned is steps[-1] or stopping)
        memory = peaks.look()
        if memory is not None and memory[1]:
            observer.gauge("memory_peak/trainer_gpu_bytes", memory[1])
        yield report, StepTimes(timed.waits_s)
        writer.check()
        saves.check()
        if saves.due(planned) or stopping:
            name, note = f"checkpoint of step {planned.step}", saves.announce(planned.step)
            timed("checkpoint", name, learner.save, writer, planned.step, note)
        if stopping:
            break
    writer.wait()
    saves.check()


def _failed(stage: str, host: HostBatch, error: str) -> str:
    return f"stage {stage} failed on {batch_name(host)}: {error}"


@dataclass
class _Stopwatch:
    """Times the stages of one step and draws their spans."""

    observer: AnyObserver
    waits_s: dict[str, float] = field(default_factory=dict)

    def __call__(self, stage: str, name: str, work: Callable[..., Any], *items: Any) -> Any:
        began_s, began = time.time(), time.perf_counter()
        result = work(*items)
        spent_s = time.perf_counter() - began
        self.observer.span(stage, "work", name, began_s, began_s + spent_s)
        if stage != "checkpoint":
            self.waits_s[f"{stage}/busy"] = self.waits_s.get(f"{stage}/busy", 0.0) + spent_s
        return result


def _pipeline(
    run: Run, stop: Callable[[], bool], observer: AnyObserver, saves: CheckpointPolicy
) -> Iterator[tuple[StepReport, StepTimes]]:
    """One process for each target device and each drafter device, and the coordinator in this one."""
    from paceline.drafter.stage import DrafterStage
    from paceline.target_model.stage import TargetStage
    from paceline.target_model.vllm_stage import VllmStage

    settings, flow, steps = run.settings, run.settings.flow, run.remaining
    validation = run.plan.validation_batches(run.heldout)
    pool = feature_pool(run, validation)
    left_before = checkpoints.being_written(run.run_dir)
    hosts = run.plan.host_batches(steps, run.local_ranks, run.num_ranks)
    feed = Prefetcher(hosts, flow.prefetch_batches * len(flow.target_devices), flow.prefetch_bytes, HostBatch.num_bytes)
    targets: list[WorkerProcess] = []
    drafters: list[WorkerProcess] = []
    computing: Any = {"threads": flow.threads, "deterministic": settings.train.deterministic}
    patience_s = 0.0
    with rank_groups(run.nodes, len(flow.drafter_devices)) as groups:
        try:
            for number, device in enumerate(flow.target_devices):
                name, ahead = f"target {number} ({device})", tasks_in_flight(device)
                arguments: tuple[Any, ...] = (settings.target, run.taps, device, pool)
                if settings.target.engine == "vllm":
                    log = run.run_dir / f"vllm-{run.nodes.here.number}-{number}.log"
                    arguments += (settings.data.max_length, log)
                stage = VllmStage if settings.target.engine == "vllm" else TargetStage
                targets.append(WorkerProcess(name, stage, arguments, device=device, max_outstanding=ahead, **computing))
            for rank, device in enumerate(flow.drafter_devices):
                name, build = f"drafter {rank} ({device})", learner_factory(run, rank, groups[rank])
                profile = _profile(run) if rank == 0 and run.nodes.first else None
                writer = checkpoint_writer(run) if rank == 0 and run.nodes.first else None
                of_rank = (build, pool, writer, profile, run.plan.total_steps, run.nodes.here.count > 1)
                drafters.append(WorkerProcess(name, DrafterStage, of_rank, device=device, **computing))
            work = Work(steps, feed, validation, run.plan.largest_batches())
            coordinator = Coordinator(
                targets,
                drafters,
                pool,
                work,
                flow,
                saves=saves,
                telemetry=observer,
                stop_requested=stop,
                nodes=run.nodes,
            )
            for report, times in coordinator.run():
                yield report, times
                saves.check()
            saves.check()
            patience_s = 5.0
        except PacelineError:
            if drafters:
                await_written(run.run_dir, left_before, drafters[0].process.is_alive)
            raise
        finally:
            feed.close()
            for worker in (*targets, *drafters):
                worker.stop(patience_s)


def _profile(run: Run) -> StepProfile:
    return StepProfile(run.settings.observe.profile_steps, run.run_dir / PROFILE_FILE)


def _log_failure(run: Run, error: PacelineError, observer: AnyObserver) -> None:
    """Keep the traceback of a failed stage; the user sees one line."""
    notes = getattr(error, "__notes__", [])
    if notes:
        name = "failure.log" if run.nodes.first else f"failure-machine-{run.nodes.here.number}.log"
        try:
            write_text(run.run_dir / name, "\n".join([*error.errors, *notes]) + "\n")
        except OSError as unwritten:
            observer.warn(f"{run.run_dir / name}: traceback not written ({unwritten.strerror})")
    observer.event("failure", error=str(error))
