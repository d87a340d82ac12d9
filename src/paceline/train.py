"""Read first: builds the rooms, joins them with channels, runs the loop, owns the order of shutdown.

    store ─► plan ─► feed ─► target ─► drafter ─► checkpoint
                      └────── flow ───────┘
    every StepReport ─► observe

`compose.py` turns settings into a `Run`: everything that is known, and refused, before a model loads. `train`
runs it: `inline`, the same stages one after another in this process (the reference), or `pipeline`, one process
per role joined by the hub. Both give the same weights, bit for bit, when delivery is ordered.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.checkpoint import checkpoints, run_directory
from paceline.device import own_device
from paceline.errors import PacelineError
from paceline.observe.observer import Observer, open_observer
from paceline.pipeline.coordinator import Coordinator
from paceline.pipeline.local_ranks import LocalRanks
from paceline.pipeline.prefetch import Prefetcher
from paceline.pipeline.process import WorkerProcess
from paceline.pipeline.profiler import PROFILE_FILE, StepProfile, clear_profile
from paceline.pipeline.signals import GracefulStop
from paceline.pipeline.telemetry import PeakMemory, RemoteObserver
from paceline.run.build import Run, feature_pool, host_batches, largest_batch, validation_batches
from paceline.run.checkpoint_policy import CheckpointPolicy, await_written, checkpoint_writer
from paceline.run.eval_worker import background_evaluation
from paceline.run.learner_factory import learner_factory
from paceline.run.step_metrics import StepMetrics
from paceline.types import HostBatch, PlannedStep, StepReport

if TYPE_CHECKING:
    from rich.console import Console


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
    """Train from where the run stands to its end, or to where the user stops it.

    Args:
        run: from `compose`.
        notice: hears what the user should know at once.
        console: where progress is shown; standard error if unset.

    Raises:
        StageError: a stage failed; the run goes on from its newest checkpoint when started again.
        CheckpointError: a checkpoint could not be written.
    """
    orders = run.remaining
    if not orders and not run.machines.first:
        return Outcome(run.first_step, len(run.orders), stopped=False)
    if not orders:
        checkpoints.read_checkpoint(run.run_dir, run.first_step)
        return Outcome(run.first_step, len(run.orders), stopped=False)
    observer = _observer(run, orders[0], console) if run.machines.first else RemoteObserver()
    engine = _inline if run.settings.flow.mode == "inline" else _pipeline
    last, status = run.first_step, "failed: unforeseen"
    profile = run.run_dir / PROFILE_FILE
    if run.machines.first:
        clear_profile(run.settings.observe.profile_steps, profile, run.first_step)
    try:
        _tell_of_checkpoints(run, observer)
        account = StepMetrics(run)
        with GracefulStop(notice) as stop, background_evaluation(run, observer, stop) as decoding:
            for report in engine(run, orders, stop, observer, CheckpointPolicy(run, observer)):
                observer.step(account(report) if run.machines.first else report)
                last = report.step
                decoding.look()
            if last == len(run.orders):
                decoding.finish()
        status = "finished" if last == len(run.orders) else "stopped"
        if run.settings.observe.profile_steps is not None and run.machines.first:
            observer.note(f"profile of the steps: {profile}" if profile.exists() else "no step was profiled")
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except PacelineError as error:
        status = f"failed: {error.errors[0]}"
        _log_failure(run, error, observer)
        raise
    finally:
        observer.close(status)
    held = checkpoints.newest_step(run.run_dir) if run.machines.first else last
    return Outcome(held, len(run.orders), stopped=status == "stopped")


def _observer(run: Run, first: PlannedStep, console: Console | None) -> Observer:
    plan = run.plan_of(first.epoch)
    header = {
        **run_directory.read_run_facts(run.run_dir),
        "bucket_edges": plan.edges.tolist(),
    }
    if run.settings.plan.leftover != "carry":  # an epoch that hands samples on to the next has a size of its own
        header["samples_per_epoch"] = plan.num_samples
    return open_observer(
        run.settings.observe,
        run.run_dir,
        total_steps=len(run.orders),
        header=header,
        first_step=run.first_step,
        console=console,
    )


def _tell_of_checkpoints(run: Run, observer: Observer | RemoteObserver) -> None:
    """What the user should know of the checkpoint that the run goes on from; damaged ones do not count any more."""
    if not run.first_step or not run.machines.first:
        return
    checkpoints.quarantine_after(run.run_dir, run.first_step)
    for text in run.damaged:
        observer.warn(text)
    before, now = checkpoints.read_note(run.run_dir, run.first_step)["versions"], run_directory.versions()
    changed = [f"{name} {before.get(name)} → {now[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        observer.warn(f"goes on with other versions, so the last bits may differ: {', '.join(changed)}")


def _profile(run: Run) -> StepProfile:
    return StepProfile(run.settings.observe.profile_steps, run.run_dir / PROFILE_FILE)


def _inline(
    run: Run,
    orders: Sequence[PlannedStep],
    stop: Callable[[], bool],
    observer: Observer | RemoteObserver,
    saves: CheckpointPolicy,
) -> Iterator[StepReport]:
    from paceline.target_model.load import load_target
    from paceline.target_model.shared_weights import shared_weights
    from paceline.target_model.tap_guard import guard_first_batch

    device = run.settings.flow.target_devices[0]
    own_device(device)
    torch.set_num_threads(run.settings.flow.threads)
    target = load_target(run.settings.target, run.taps, device)
    tapped = functools.partial(target.features, with_last=run.settings.objective.needs_teacher)
    learner = learner_factory(run)(shared_weights(target, with_teacher=run.settings.objective.needs_teacher))
    writer = checkpoint_writer(run)
    batches = host_batches(run, orders)
    for host in validation_batches(run):
        learner.hold_for_validation(tapped(host))
    profile, peaks = _profile(run), PeakMemory(device)
    for order in orders:
        timed = _Stopwatch(observer)
        profile.before(order.step)
        for index in order.batches:
            host = timed("feed", f"batch {index}", next, batches)
            features = timed("target", f"batch {index}", tapped, host)
            if order is orders[0] and index == order.batches[0]:
                guard_first_batch(target, features)
            timed("drafter", f"batch {index}", learner.accumulate, features)
        report = timed("drafter", f"optimizer step {order.step}", learner.step, order)
        stopping = stop()
        profile.after(order.step, last=order is orders[-1] or stopping)
        memory = peaks.look()
        if memory is not None and memory[1]:
            observer.gauge("memory_peak/trainer_gpu_bytes", memory[1])
        yield replace(report, waits_s=timed.waits_s)
        writer.check()
        if saves.due(order) or stopping:
            note = saves.announce(order.step)
            timed("checkpoint", f"checkpoint of step {order.step}", learner.save, writer, order.step, note)
        if stopping:
            break
    writer.wait()


class _Stopwatch:
    """Times the stages of one step and draws their spans."""

    def __init__(self, observer: Observer | RemoteObserver) -> None:
        self._observer = observer
        self.waits_s: dict[str, float] = {}

    def __call__(self, stage: str, name: str, work: Callable[..., Any], *items: Any) -> Any:
        began_s, began = time.time(), time.perf_counter()
        result = work(*items)
        spent_s = time.perf_counter() - began
        self._observer.span(stage, "work", name, began_s, began_s + spent_s)
        if stage != "checkpoint":
            self.waits_s[f"{stage}/busy"] = self.waits_s.get(f"{stage}/busy", 0.0) + spent_s
        return result


def _pipeline(
    run: Run,
    orders: Sequence[PlannedStep],
    stop: Callable[[], bool],
    observer: Observer | RemoteObserver,
    saves: CheckpointPolicy,
) -> Iterator[StepReport]:
    from paceline.drafter.stage import DrafterStage
    from paceline.target_model.stage import TargetStage

    settings, flow = run.settings, run.settings.flow
    validation = validation_batches(run)
    pool = feature_pool(run, validation)
    ranks, place = len(flow.drafter_devices), run.machines.place
    own = ranks > 1 and place.count == 1
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if own else None
    workers: list[WorkerProcess] = []
    known = checkpoints.being_written(run.run_dir)
    patience_s = 0.0
    opening = [PlannedStep(0, -1, -1, range(len(validation)), save=False)] if validation else []
    hosts = itertools.chain(validation, host_batches(run, orders))
    ahead = flow.prefetch_batches * len(flow.target_devices)
    feed = Prefetcher(hosts, ahead, flow.prefetch_bytes, HostBatch.num_bytes)
    try:
        for number, device in enumerate(flow.target_devices):
            arguments = (settings.target, run.taps, device, pool)
            name = f"target {number} ({device})"
            workers.append(WorkerProcess(name, TargetStage, arguments, device=device, threads=flow.threads))
        for rank, device in enumerate(flow.drafter_devices):
            build = learner_factory(run, rank, meeting.port if meeting else 0)
            profile = _profile(run) if rank == 0 and run.machines.first else None
            stage = (build, pool, checkpoint_writer(run), profile, len(run.orders), place.count > 1)
            name = f"drafter {rank} ({device})"
            workers.append(WorkerProcess(name, DrafterStage, stage, device=device, threads=flow.threads))
        hub = Coordinator(
            workers[:-ranks],
            workers[-ranks:],
            num_buffers=pool.num_buffers,
            feed=feed,
            orders=[*opening, *orders],
            delivery=flow.delivery,
            stall_limit_s=flow.stall_limit_s,
            stop_requested=stop,
            saves=saves,
            share=LocalRanks(place.number * ranks, run.num_ranks, place.count, run.machines.error),
            probe=largest_batch(run),
            witness=observer,
            buffer_bytes=pool.num_bytes // pool.num_buffers,
            token_bytes=pool.token_bytes,
        )
        yield from hub.run()
        patience_s = 5.0
    except PacelineError:
        if workers and workers[-1].name.startswith("drafter"):
            await_written(run.run_dir, known, workers[-ranks].process.is_alive)
        raise
    finally:
        feed.close()
        for worker in workers:
            worker.stop(patience_s)


def _log_failure(run: Run, error: PacelineError, observer: Observer | RemoteObserver) -> None:
    """Keep the traceback of a failed stage; the user sees one line."""
    notes = getattr(error, "__notes__", [])
    if notes:
        name = "failure.log" if run.machines.first else f"failure-machine-{run.machines.place.number}.log"
        try:
            run.run_dir.mkdir(parents=True, exist_ok=True)
            (run.run_dir / name).write_text("\n".join([*error.errors, *notes]) + "\n", encoding="utf-8")
        except OSError as unwritten:
            observer.warn(f"{run.run_dir / name}: traceback not written ({unwritten.strerror})")
    observer.event("failure", error=str(error))
