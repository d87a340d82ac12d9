"""The coordinator: one event loop in the parent that hands batches to target workers and features to drafter ranks.

Every edge is a pipe with one reader and one writer, so a killed process can leave no lock behind. Backpressure is the
number of free buffers. Buffers are handed out in plan order; a drafter is sent only micro-batches of the window that is
open, so every step trains exactly what the plan gave it, whatever the timing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from paceline.config import FlowConfig
from paceline.errors import NOT_TRAINED, Interrupted, PacelineError, StageError
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.messages import (
    START_UP,
    BufferReleased,
    BuildDrafter,
    CheckpointTaken,
    DrafterBuilt,
    DrafterTask,
    Failed,
    FeaturesReady,
    MemoryProbe,
    Probed,
    Ready,
    Reply,
    SaveCheckpoint,
    ShareWeights,
    StepTaken,
    TakeStep,
    TargetTask,
    ValidationTask,
    WeightsShared,
    describe,
)
from paceline.pipeline.multinode import ALONE, MAX_STEPS_AHEAD, Nodes
from paceline.pipeline.prefetch import Prefetcher
from paceline.pipeline.process import WorkerProcess
from paceline.pipeline.telemetry import PipelineTelemetry, Telemetry, TimeAccount
from paceline.types import HostBatch, PlannedStep, StepReport, StepTimes

BatchKey = tuple[int, int]
"""(epoch, index): a micro-batch of the run."""

START_LIMIT_S = 600.0
"""Loading a target may take minutes, in which a worker sends nothing."""

PEER_PATIENCE_S = 8.0
"""A rank that misses another one is taken for the cause itself only after this long; a machine that is gone is named
within it."""


class Saves(Protocol):
    """Says in the parent when the state is written."""

    def due(self, planned: PlannedStep) -> bool:
        """Whether a checkpoint follows this step; asked once a step, when its window closes."""
        ...

    def announce(self, step: int) -> Mapping[str, Any]:
        """Called when the step's report has been taken in, before its state is; gives the note of the checkpoint."""
        ...


@dataclass(frozen=True)
class Work:
    """What a pipeline is to do.

    Attributes:
        steps: optimizer steps to take, in order.
        batches: their host batches in plan order (those that this machine's ranks train), made ahead on a thread.
        validation: held-out batches that the first drafter rank keeps, before training.
        largest: planned batches that every worker runs once before all others, to see that they fit in memory.
    """

    steps: Sequence[PlannedStep]
    batches: Prefetcher[HostBatch]
    validation: Sequence[HostBatch] = ()
    largest: Sequence[HostBatch] = ()


class Coordinator:
    """Joins target workers and drafter ranks.

    Args:
        targets, drafters: running workers.
        pool: buffers between them.
        work: what they are to do.
        flow: delivery (``ordered`` forwards to every rank in plan order, ``ready`` whatever of the open window is
            ready) and the time after which a worker without a sign of progress is named and the run stopped.
        saves: says when the state is written. Before it is, the step's report has been taken in; the window after it
            waits until then, so that a checkpoint never is ahead of what is known about it.
        telemetry: takes in every span of work, queue depths and memory.
        stop_requested: asked between windows; True ends the run after the open window, with a checkpoint.
        nodes: the machines that train together, seen from this one.
    """

    def __init__(
        self,
        targets: Sequence[WorkerProcess],
        drafters: Sequence[WorkerProcess],
        pool: FeaturePool,
        work: Work,
        flow: FlowConfig,
        *,
        saves: Saves,
        telemetry: Telemetry,
        stop_requested: Callable[[], bool] = lambda: False,
        nodes: Nodes = ALONE,
    ) -> None:
        self._targets, self._drafters = list(targets), list(drafters)
        self._work, self._flow, self._saves = work, flow, saves
        self._nodes, self._stop_requested = nodes, stop_requested
        self._first_rank = nodes.here.number * len(self._drafters)
        self._num_ranks = nodes.here.count * len(self._drafters)
        self._steps, self._feed = deque(work.steps), work.batches
        self._free_buffers = deque(range(pool.num_buffers))
        self._open_places: deque[WorkerProcess] = deque()
        """Target workers that may be sent a task, each as often as it may be sent one more."""
        self._next_host: HostBatch | None = None
        self._computed: dict[BatchKey, DrafterTask] = {}
        self._open: PlannedStep | None = None
        self._missing: list[BatchKey] = []
        """Micro-batches of the open window that no drafter has been sent yet, in plan order."""
        self._closing: dict[int, dict[str, StepReport]] = {}
        """Reports of the ranks that have taken a step, by step, until all have."""
        self._reported = (self._steps[0].step if self._steps else 1) - 1
        self._stop_after: int | None = None
        self._missed_peer: tuple[StageError, float] | None = None
        self._to_save: int | None = None
        self._num_saving = 0
        self._account = TimeAccount(worker.key for worker in (*self._targets, *self._drafters))
        devices = dict(zip((worker.key for worker in self._targets), flow.target_devices, strict=False))
        devices |= dict(zip((worker.key for worker in self._drafters), flow.drafter_devices, strict=False))
        self._telemetry = PipelineTelemetry(telemetry, pool.num_bytes // pool.num_buffers, pool.token_bytes, devices)
        self.last_step: int | None = None

    def run(self) -> Iterator[tuple[StepReport, StepTimes]]:
        """Take all steps; yields each report, with its times, once all ranks have taken the step.

        Raises:
            StageError: a worker raised, died or made no progress; names stage, batch and samples.
            Interrupted: the user asked to stop before training began.
        """
        self._prepare()
        while self._steps or self._open is not None or self._closing or self._num_saving:
            if self._open is None and not self._closing and self._steps and self._stops_before(self._steps[0]):
                self._steps.clear()
                if self.last_step is not None:
                    self._save(self.last_step)
            self._dispatch()
            self._forward()
            for report, times in self._listen():
                yield report, times
                if self._to_save == report.step:
                    self._save(report.step)

    def _prepare(self) -> None:
        """Wait for the workers, join drafters and target, run the largest batches, hand over the validation batches."""
        workers = [*self._targets, *self._drafters]
        self._listen_until(lambda: all(worker.ready for worker in workers))
        for worker in self._targets[:1]:
            self._ask(worker, ShareWeights())  # its answer is sent on to all drafter ranks
        self._listen_until(lambda: not any(worker.outstanding for worker in self._drafters))
        for worker in workers:
            # The drafter ranks come last: they read the features that the targets have left in the buffers.
            for buffer, host in enumerate(self._work.largest):
                self._ask(worker, MemoryProbe(host, buffer))
        for host in self._work.validation:
            self._ask(self._targets[0], ValidationTask(host, 0))
            self._ask(self._drafters[0], ValidationTask(host, 0))
        most = max((worker.max_outstanding for worker in self._targets), default=0)
        for number in range(most):
            self._open_places.extend(worker for worker in self._targets if number < worker.max_outstanding)
        self._account.begin()

    def _ask(self, worker: WorkerProcess, task: Any) -> None:
        """Send a task and wait for its answer."""
        worker.send(task)
        self._listen_until(lambda: not worker.outstanding)

    def _listen_until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._stop_requested():
                raise Interrupted(NOT_TRAINED)
            deque(self._listen(), maxlen=0)  # no step is taken yet

    def _stops_before(self, planned: PlannedStep) -> bool:
        """Whether the user's wish to stop takes effect here: several machines stop after a step that all agree on."""
        if self._nodes.here.count == 1:
            return self._stop_requested()
        return self._stop_after is not None and planned.step > self._stop_after

    def _must_wait(self, planned: PlannedStep) -> bool:
        """Whether this machine is as far ahead of the others as it may be."""
        return self._nodes.here.count > 1 and planned.step > self._reported + MAX_STEPS_AHEAD

    def _dispatch(self) -> None:
        """Hand host batches to target workers, in plan order, while there are places and buffers."""
        while self._open_places and self._free_buffers:
            if self._next_host is None:
                self._next_host = self._take()
            if self._next_host is None:
                return
            self._telemetry.fed(self._next_host, *self._feed.made_s)
            self._book()
            self._open_places.popleft().send(TargetTask(self._next_host, self._free_buffers.popleft()))
            self._next_host = None

    def _take(self) -> HostBatch | None:
        try:
            return self._feed.take()
        except PacelineError:
            raise
        except Exception as error:
            raise StageError(f"stage feed failed: {type(error).__name__}: {error}") from error

    def _book(self) -> None:
        """Book the time up to now; called before a worker gets or ends work and before a buffer is taken or freed."""
        self._account.book(idle=sum(not worker.outstanding for worker in self._targets), blocked=not self._free_buffers)

    def _forward(self) -> None:
        """Hand features to the ranks that train them, open windows, close those that were sent whole."""
        while True:
            if self._open is None:
                if not self._steps or self._to_save is not None or self._stops_before(self._steps[0]):
                    return
                if self._must_wait(self._steps[0]):
                    return
                self._open = self._steps.popleft()
                self._missing = [(self._open.epoch, index) for index in self._trained_here(self._open)]
            key = next((key for key in self._candidates(self._open) if key in self._computed), None)
            if key is not None:
                task = self._computed.pop(key)
                self._missing.remove(key)
                self._drafters[self._open.rank_of(key[1], self._num_ranks) - self._first_rank].send(task)
            elif self._missing:
                return
            if not self._missing:
                self._close(self._open)

    def _candidates(self, planned: PlannedStep) -> list[BatchKey]:
        """What may be forwarded next: anything of the window, or in plan order the next one of every rank."""
        if self._flow.delivery == "ready":
            return self._missing
        first_of: dict[int, BatchKey] = {}
        for key in self._missing:
            first_of.setdefault(planned.rank_of(key[1], self._num_ranks), key)
        return list(first_of.values())

    def _trained_here(self, planned: PlannedStep) -> list[int]:
        """Micro-batches of a window that this machine's ranks train."""
        here = range(self._first_rank, self._first_rank + len(self._drafters))
        return [index for index in planned.batches if planned.rank_of(index, self._num_ranks) in here]

    def _close(self, planned: PlannedStep) -> None:
        self._open = None
        self._closing[planned.step] = {}
        self.last_step = planned.step
        for worker in self._drafters:
            worker.send(TakeStep(planned, self._stop_requested()))
        if self._nodes.first and self._saves.due(planned):
            self._to_save = planned.step

    def _save(self, step: int) -> None:
        """Ranks are equal after every step: the first of all writes the checkpoint, the others of its machine give it
        what they alone hold of the optimizer's state."""
        if not self._nodes.first:
            return
        self._to_save = None
        self._num_saving += len(self._drafters)
        save = SaveCheckpoint(step, self._saves.announce(step), last=not self._steps)
        for worker in self._drafters:
            worker.send(save)

    def _listen(self) -> Iterator[tuple[StepReport, StepTimes]]:
        """Wait a moment for replies and react to them."""
        workers = [worker for worker in (*self._targets, *self._drafters) if not worker.lost_peer]
        by_handle: dict[Any, WorkerProcess] = {worker.connection: worker for worker in workers}
        sentinels = {worker.process.sentinel: worker for worker in workers}
        hungry = self._open_places and self._free_buffers and self._next_host is None and not self._feed.finished
        handles: list[Any] = [*by_handle, *sentinels, *([self._feed.wakeup] if hungry else [])]
        ready = wait(handles, timeout=0.2)
        for handle in ready:
            if isinstance(handle, Connection) and handle in by_handle:
                yield from self._receive(by_handle[handle])
        for handle in ready:
            if handle in sentinels:
                worker = sentinels[handle]
                yield from self._receive(worker)
                raise StageError(f"stage {worker.name} {worker.death()} while working on {worker.doing()}")
        self._watch(workers)
        elsewhere = self._nodes.error()
        if elsewhere is not None:
            raise StageError(elsewhere)
        if self._missed_peer is not None and time.monotonic() > self._missed_peer[1]:
            raise self._missed_peer[0]

    def _watch(self, workers: Sequence[WorkerProcess]) -> None:
        """Name a worker that makes no progress."""
        limit_s = self._flow.stall_limit_s
        for worker in workers:
            starting = worker.doing() == START_UP
            if worker.silent_s() > (max(limit_s, START_LIMIT_S) if starting else limit_s):
                raise StageError(
                    f"stage {worker.name} has shown no progress for {worker.silent_s():.0f} s while working on "
                    f"{worker.doing()}; the limit is flow.stall_limit_s = {limit_s:g}"
                    + (f", for start-up at least {START_LIMIT_S:g} s" if starting else "")
                )

    def _receive(self, worker: WorkerProcess) -> Iterator[tuple[StepReport, StepTimes]]:
        while True:
            try:
                if not worker.connection.poll():
                    return
                reply: Reply = worker.connection.recv()
            except (EOFError, OSError):
                return
            worker.last_heard = time.monotonic()
            yield from self._react(worker, reply)

    def _react(self, worker: WorkerProcess, reply: Reply) -> Iterator[tuple[StepReport, StepTimes]]:
        payload = reply.payload
        if reply.memory is not None:
            self._telemetry.memory(worker.key, *reply.memory)
        if isinstance(payload, Ready):
            worker.ready = True
            return
        if isinstance(payload, Failed):
            self._fail(worker, payload)
            return
        self._book()
        task = worker.outstanding.popleft()
        if isinstance(payload, DrafterBuilt):
            return
        if isinstance(payload, WeightsShared):
            for rank in self._drafters:
                rank.send(BuildDrafter(payload.weights))
            return
        if isinstance(payload, Probed):
            self._telemetry.probed(payload)
            return
        self._account.work(worker.key, task, reply)
        self._telemetry.work(worker.name, task, reply)
        self._telemetry.queues(reply.ended_s, len(self._feed.waiting), len(self._untrained()), len(self._free_buffers))
        if isinstance(task, ValidationTask):
            return
        if isinstance(payload, FeaturesReady):
            self._open_places.append(worker)
            planned = task.host.planned
            self._computed[(planned.epoch, planned.index)] = DrafterTask(task.host, payload.buffer)
        elif isinstance(payload, BufferReleased):
            self._free_buffers.append(payload.buffer)
        elif isinstance(payload, StepTaken):
            yield from self._step_taken(worker, payload)
        elif isinstance(payload, CheckpointTaken):
            self._num_saving -= 1
        else:
            raise StageError(f"stage {worker.name} answered {describe(task)} with {type(payload).__name__}")

    def _fail(self, worker: WorkerProcess, failed: Failed) -> None:
        """End the run with the worker's error; one that only misses another rank is waited with, for that one's."""
        error = StageError(f"stage {worker.name} failed on {failed.doing}: {failed.error}")
        error.add_note(failed.trace)
        if not failed.peer:
            raise error
        worker.lost_peer = True
        self._nodes.suspect()
        self._missed_peer = self._missed_peer or (error, time.monotonic() + PEER_PATIENCE_S)

    def _step_taken(self, worker: WorkerProcess, taken: StepTaken) -> Iterator[tuple[StepReport, StepTimes]]:
        """A rank has taken a step; once all have, the first one's report goes out: its counters are those of all."""
        step = taken.report.step
        reports = self._closing[step]
        reports[worker.key] = taken.report
        if len(reports) < len(self._drafters):
            return
        del self._closing[step]
        self._reported = step
        if taken.stop and self._stop_after is None:
            self._stop_after = step + MAX_STEPS_AHEAD - 1
        self._telemetry.depths(self._feed.waiting, self._untrained(), len(self._free_buffers))
        yield reports[self._drafters[0].key], self._account.take(self._feed.spent())

    def _untrained(self) -> list[DrafterTask]:
        """Features that wait: computed and held back, or sent to a drafter that is at something else."""
        sent = (task for worker in self._drafters for task in list(worker.outstanding)[1:])
        return [*self._computed.values(), *(task for task in sent if isinstance(task, DrafterTask))]
