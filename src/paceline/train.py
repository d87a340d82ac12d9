"""Read first: builds the rooms, joins them with channels, runs the loop, owns the order of shutdown.

    store ─► plan ─► feed ─► target ─► drafter ─► checkpoint
                      └────── flow ───────┘
    every StepReport ─► observe

`compose.py` turns settings into a `Composition`: everything that is known, and refused, before a model loads. `train`
runs it: `inline`, the same stages one after another in this process (the reference), or `pipeline`, one process
per role joined by the hub. Both give the same weights, bit for bit, when delivery is ordered.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.account import Account
from paceline.background import background_decoding
from paceline.checkpoint import rundir, store
from paceline.checkpoint.writer import CheckpointWriter
from paceline.compose import Composition, feature_pool, host_batches, largest_batch, validation_batches
from paceline.config import Settings
from paceline.contracts import HostBatch, StepReport
from paceline.drafter.spec import DrafterSpec
from paceline.errors import PacelineError
from paceline.flow.hub import Hub
from paceline.flow.machines import GroupPlace, meeting_prefix
from paceline.flow.messages import StepOrder
from paceline.flow.prefetch import Prefetcher
from paceline.flow.profile import PROFILE_FILE, StepProfile, clear_profile
from paceline.flow.share import Share
from paceline.flow.stop import StopRequest
from paceline.flow.witness import Elsewhere, PeakMemory
from paceline.flow.worker import Worker
from paceline.observe.observer import Observer, open_observer
from paceline.saving import Saving, await_written, checkpoint_writer
from paceline.warm import initial_weights

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.drafter.learner import Learner


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


@dataclass(frozen=True)
class LearnerRecipe:
    """Builds the learner of a drafter rank, in whichever process; pickles.

    Attributes:
        settings, spec, run_dir, total_steps, first_step: of the run.
        rank: which of `flow.drafter_devices`.
        group: where it finds the other ranks; None for a rank that is alone.
    """

    settings: Settings
    spec: DrafterSpec
    run_dir: Path
    total_steps: int
    first_step: int
    rank: int = 0
    group: GroupPlace | None = None

    @property
    def device(self) -> str:
        """Where the rank runs."""
        return self.settings.flow.drafter_devices[self.rank]

    def __call__(self) -> Learner:
        """The learner, with the state of the checkpoint that the run goes on from."""
        from paceline.drafter.learner import Learner
        from paceline.target.load import load_embedding_and_head
        from paceline.target.teacher import load_teacher

        settings, target = self.settings, self.settings.target
        embedding, head = load_embedding_and_head(target.path, torch.float32, target.trust_remote_code, target.adapter)
        teacher = None
        if settings.objective.needs_teacher:
            teacher = load_teacher(target, self.device)
        learner = Learner(
            self.spec,
            embedding=embedding,
            head=head,
            drafter=settings.drafter,
            objective=settings.objective,
            optimizer=settings.optimizer,
            total_steps=self.total_steps,
            seed=settings.seed,
            device=self.device,
            world=self.group.join(self.device) if self.group else None,
            teacher=teacher,
        )
        if self.group is not None and self.group.across_machines:
            self._start_as_the_first(learner, self.group)
        else:
            self._begin(learner)
        return learner

    def _begin(self, learner: Learner) -> None:
        """Take on the checkpoint that the run goes on from, or the drafter folder that it begins with."""
        if self.first_step:
            learner.load_state_dict(store.read_checkpoint(self.run_dir, self.first_step))
        elif self.settings.drafter.init is not None:
            learner.network.load_state_dict(initial_weights(self.settings.drafter.init))

    def _start_as_the_first(self, learner: Learner, group: GroupPlace) -> None:
        """All ranks take on the state of rank 0, which alone reads the checkpoint: the disk need not be shared."""
        from paceline.drafter.ranks import spread_state

        assert learner.world is not None, "the rank has joined its group"
        state = None
        if group.rank == 0:
            self._begin(learner)
            state = learner.state_dict()
        learner.load_state_dict(spread_state(state, learner.world, learner.device))


def recipe(run: Composition, rank: int = 0, port: int = 0) -> LearnerRecipe:
    """How a drafter rank of this run is built.

    Args:
        run: from `compose`.
        rank: which of this machine's.
        port: of this machine's store, where it is the only one and several ranks must find one another.
    """
    place, group = run.machines.place, None
    if run.num_ranks > 1 and (port or place.count > 1):
        group = GroupPlace(
            place.address,
            port or place.port,
            f"{meeting_prefix(place)}/ranks",
            place.number * len(run.settings.flow.drafter_devices) + rank,
            run.num_ranks,
            place.count > 1,
        )
    return LearnerRecipe(run.settings, run.spec, run.run_dir, len(run.orders), run.first_step, rank, group)


def train(run: Composition, *, notice: Callable[[str], None], console: Console | None = None) -> Outcome:
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
        store.read_checkpoint(run.run_dir, run.first_step)
        return Outcome(run.first_step, len(run.orders), stopped=False)
    observer = _observer(run, orders[0], console) if run.machines.first else Elsewhere()
    engine = _inline if run.settings.flow.mode == "inline" else _pipeline
    last, status = run.first_step, "failed: unforeseen"
    profile = run.run_dir / PROFILE_FILE
    if run.machines.first:
        clear_profile(run.settings.observe.profile_steps, profile, run.first_step)
    try:
        _tell_of_checkpoints(run, observer)
        account = Account(run)
        with StopRequest(notice) as stop, background_decoding(run, observer, stop) as decoding:
            for report in engine(run, orders, stop, observer, Saving(run, observer)):
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
    except PacelineError as fault:
        status = f"failed: {fault.faults[0]}"
        _log_failure(run, fault, observer)
        raise
    finally:
        observer.close(status)
    held = store.newest_step(run.run_dir) if run.machines.first else last
    return Outcome(held, len(run.orders), stopped=status == "stopped")


def _observer(run: Composition, first: StepOrder, console: Console | None) -> Observer:
    plan = run.plan_of(first.epoch)
    header = {
        **rundir.read_run_facts(run.run_dir),
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


def _tell_of_checkpoints(run: Composition, observer: Observer | Elsewhere) -> None:
    """What the user should know of the checkpoint that the run goes on from; damaged ones do not count any more."""
    if not run.first_step or not run.machines.first:
        return
    store.put_aside_after(run.run_dir, run.first_step)
    for text in run.damaged:
        observer.warn(text)
    before, now = store.read_note(run.run_dir, run.first_step)["versions"], rundir.versions()
    changed = [f"{name} {before.get(name)} → {now[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        observer.warn(f"goes on with other versions, so the last bits may differ: {', '.join(changed)}")


def _profile(run: Composition) -> StepProfile:
    return StepProfile(run.settings.observe.profile_steps, run.run_dir / PROFILE_FILE)


def _inline(
    run: Composition,
    orders: Sequence[StepOrder],
    stop: Callable[[], bool],
    observer: Observer | Elsewhere,
    saves: Saving,
) -> Iterator[StepReport]:
    from paceline.drafter.worker import with_validation
    from paceline.target.guard import guard_first_batch
    from paceline.target.load import load_target

    torch.set_num_threads(run.settings.flow.threads)
    target = load_target(run.settings.target, run.taps, run.settings.flow.target_devices[0])
    tapped = functools.partial(target.features, with_last=run.settings.objective.needs_teacher)
    learner = recipe(run)()
    writer = checkpoint_writer(run)
    batches = host_batches(run, orders)
    validation = [tapped(host) for host in validation_batches(run)]
    profile, peaks = _profile(run), PeakMemory()
    began = time.perf_counter()
    for order in orders:
        timed = _Stopwatch(observer)
        profile.before(order.step)
        for index in order.batches:
            host = timed("feed", f"batch {index}", next, batches)
            features = timed("target", f"batch {index}", tapped, host)
            if order is orders[0] and index == order.batches[0]:
                guard_first_batch(target, features)
            timed("drafter", f"batch {index}", learner.accumulate, features)
        now = time.perf_counter()
        close = functools.partial(learner.step, step=order.step, epoch=order.epoch, window=order.window)
        report = timed("drafter", f"optimizer step {order.step}", functools.partial(close, seconds=now - began))
        began = now
        if order.validate and validation:
            report = with_validation(report, timed("drafter", "validation", learner.validate, validation))
        stopping = stop()
        profile.after(order.step, last=order is orders[-1] or stopping)
        memory = peaks.look()
        if memory is not None and memory[1]:
            observer.gauge("memory_peak/trainer_gpu_bytes", memory[1])
        yield replace(report, waits_s=timed.waits_s)
        writer.check()
        if saves.due(order) or stopping:
            note = saves.announce(order.step)
            timed("checkpoint", f"checkpoint of step {order.step}", _take, writer, order.step, learner, note)
        if stopping:
            break
    writer.wait()


def _take(writer: CheckpointWriter, step: int, learner: Learner, note: Mapping[str, Any]) -> None:
    writer.put(step, learner.state_dict(writer.spare()), note)


class _Stopwatch:
    """Times the stages of one step and draws their spans."""

    def __init__(self, observer: Observer | Elsewhere) -> None:
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
    run: Composition,
    orders: Sequence[StepOrder],
    stop: Callable[[], bool],
    observer: Observer | Elsewhere,
    saves: Saving,
) -> Iterator[StepReport]:
    from paceline.drafter.worker import DrafterStage
    from paceline.target.worker import TargetStage

    settings, flow = run.settings, run.settings.flow
    validation = validation_batches(run)
    pool = feature_pool(run, validation)
    ranks, place = len(flow.drafter_devices), run.machines.place
    own = ranks > 1 and place.count == 1
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if own else None
    workers: list[Worker] = []
    known = store.being_written(run.run_dir)
    patience_s = 0.0
    opening = [StepOrder(0, -1, -1, range(len(validation)), save=False)] if validation else []
    hosts = itertools.chain(validation, host_batches(run, orders))
    ahead = flow.prefetch_batches * len(flow.target_devices)
    feed = Prefetcher(hosts, ahead, flow.prefetch_bytes, HostBatch.num_bytes)
    try:
        for number, device in enumerate(flow.target_devices):
            arguments = (settings.target, run.taps, device, pool)
            workers.append(Worker(f"target {number} ({device})", TargetStage, arguments, threads=flow.threads))
        for rank, device in enumerate(flow.drafter_devices):
            build = recipe(run, rank, meeting.port if meeting else 0)
            profile = _profile(run) if rank == 0 and run.machines.first else None
            stage = (build, pool, checkpoint_writer(run), profile, len(run.orders), place.count > 1)
            workers.append(Worker(f"drafter {rank} ({device})", DrafterStage, stage, threads=flow.threads))
        hub = Hub(
            workers[:-ranks],
            workers[-ranks:],
            num_buffers=pool.num_buffers,
            feed=feed,
            orders=[*opening, *orders],
            delivery=flow.delivery,
            stall_limit_s=flow.stall_limit_s,
            stop_requested=stop,
            saves=saves,
            share=Share(place.number * ranks, run.num_ranks, place.count, run.machines.fault),
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


def _log_failure(run: Composition, fault: PacelineError, observer: Observer | Elsewhere) -> None:
    """Keep the traceback of a failed stage; the user sees one line."""
    notes = getattr(fault, "__notes__", [])
    if notes:
        name = "failure.log" if run.machines.first else f"failure-machine-{run.machines.place.number}.log"
        try:
            run.run_dir.mkdir(parents=True, exist_ok=True)
            (run.run_dir / name).write_text("\n".join([*fault.faults, *notes]) + "\n", encoding="utf-8")
        except OSError as unwritten:
            observer.warn(f"{run.run_dir / name}: traceback not written ({unwritten.strerror})")
    observer.event("failure", fault=str(fault))
