"""The hub: one event loop in the parent that hands work to target workers and features to drafter ranks.

Every edge is a pipe with one reader and one writer, so a killed process can leave no lock behind. Backpressure is the
number of free buffers. Buffers are handed out in plan order; a drafter is sent only micro-batches of the window that is
open, so every step trains exactly what the plan gave it, whatever the timing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from paceline.errors import Interrupted, PacelineError, StageError
from paceline.pipeline.local_ranks import LocalRanks
from paceline.pipeline.messages import (
    BufferReleased,
    CheckpointTaken,
    DrafterTask,
    Failed,
    FeaturesReady,
    HoldForValidation,
    MemoryProbe,
    PlannedSaves,
    Probed,
    Ready,
    Reply,
    SaveCheckpoint,
    Saves,
    StepTaken,
    TakeStep,
    TargetTask,
    describe,
)
from paceline.pipeline.multinode import MAX_STEPS_AHEAD
from paceline.pipeline.pipeline_telemetry import PipelineTelemetry
from paceline.pipeline.prefetch import Prefetcher
from paceline.pipeline.process import WorkerProcess
from paceline.pipeline.telemetry import NullTelemetry, Telemetry
from paceline.types import HostBatch, PlannedStep, StepReport

Key = tuple[int, int]
"""(epoch, index): a micro-batch of the run."""

START_LIMIT_S = 600.0
"""Loading a target may take minutes in which nothing is heard of it."""

PEER_PATIENCE_S = 5.0
"""A rank that misses another one is believed to be the cause itself only after this long."""


@dataclass(slots=True)
class Waits:
    """Seconds of one stage since the step before."""

    busy: float = 0.0
    starved: float = 0.0
    blocked: float = 0.0


class Coordinator:
    """Joins target workers and drafter ranks.

    Args:
        targets, drafters: running workers.
        num_buffers: buffers of the pool.
        feed: host batches in plan order, ahead on a thread.
        orders: the optimizer steps to take, in order.
        delivery: ``ordered`` forwards to every rank in plan order, ``ready`` whatever of the open window is ready.
        stall_limit_s: a worker without a sign of progress for this long is named and the run stopped.
        stop_requested: asked between windows; True ends the run after the open window, with a checkpoint.
        saves: says when the state is written. Before it is, the step's report has been taken in; the window after it
            waits until then, so that a checkpoint never is ahead of what is known about it.
        share: which part of the windows is trained here.
        probe: the largest planned batch, run first on one target worker after the other.
        witness: sees every span of work, queue depths and memory.
        buffer_bytes, token_bytes: size of one buffer of the pool, and of one token's features in it.
    """

    def __init__(
        self,
        targets: Sequence[WorkerProcess],
        drafters: Sequence[WorkerProcess],
        *,
        num_buffers: int,
        feed: Prefetcher[HostBatch],
        orders: Sequence[PlannedStep],
        delivery: Literal["ordered", "ready"],
        stall_limit_s: float,
        stop_requested: Callable[[], bool] = lambda: False,
        saves: Saves | None = None,
        share: LocalRanks | None = None,
        probe: HostBatch | None = None,
        witness: Telemetry | None = None,
        buffer_bytes: int = 0,
        token_bytes: int = 0,
    ) -> None:
        self._sight = PipelineTelemetry(witness or NullTelemetry(), buffer_bytes, token_bytes)
        self._targets, self._drafters, self._feed = list(targets), list(drafters), feed
        self._orders, self._delivery = deque(orders), delivery
        self._stall_limit_s, self._stop_requested = stall_limit_s, stop_requested
        self._free = deque(range(num_buffers))
        self._idle: deque[WorkerProcess] = deque()
        self._next_host: HostBatch | None = None
        self._computed: dict[Key, DrafterTask] = {}
        self._open: PlannedStep | None = None
        self._missing: list[Key] = []
        self._closing: dict[int, dict[str, StepReport]] = {}
        self._share, self._probe = share or LocalRanks(), probe
        self._num_ranks = self._share.num_ranks or len(self._drafters)
        self._ranks = range(self._share.first_rank, self._share.first_rank + len(self._drafters))
        self._reported = next((order.step for order in self._orders if order.step), 1) - 1
        self._stop_after: int | None = None
        self._suspect: tuple[StageError, float] | None = None
        self._saves: Saves = saves or PlannedSaves()
        self._to_save: int | None = None
        self._num_saving = 0
        self._waits = {"target": Waits(), "drafter": Waits()}
        self._last_look = time.perf_counter()
        self.last_step: int | None = None

    def run(self) -> Iterator[StepReport]:
        """Take all steps; yields each report once all ranks have taken the step.

        Raises:
            StageError: a worker raised, died or fell silent; names stage, batch and samples.
        """
        yield from self._await_ready()
        while self._orders or self._open is not None or self._closing or self._num_saving:
            if self._open is None and not self._closing and self._orders and self._stops_before(self._orders[0]):
                self._orders.clear()
                if self.last_step is not None:
                    self._save(self.last_step)
            self._dispatch()
            self._forward()
            yield from self._listen()

    def _stops_before(self, order: PlannedStep) -> bool:
        """Whether the user's wish to stop takes effect here: several machines stop after a step that all agree on."""
        if self._share.machines == 1:
            return self._stop_requested()
        return self._stop_after is not None and order.step > self._stop_after

    def _must_wait(self, order: PlannedStep) -> bool:
        """Whether this machine is as far ahead of the others as it may be."""
        return self._share.machines > 1 and order.step > self._reported + MAX_STEPS_AHEAD

    def _await_ready(self) -> Iterator[StepReport]:
        workers = [*self._targets, *self._drafters]
        while not all(worker.ready for worker in workers):
            if self._stop_requested():
                raise Interrupted("stopped while the workers were starting; nothing was trained in this start")
            yield from self._listen()
        for worker in self._targets:
            if self._probe is not None:
                worker.send(MemoryProbe(self._probe))
            while worker.outstanding:
                yield from self._listen()
        self._idle.extend(self._targets)
        self._last_look = time.perf_counter()

    def _dispatch(self) -> None:
        self._account()
        while self._idle and self._free:
            if self._next_host is None:
                self._next_host = self._take()
            if self._next_host is None:
                return
            self._sight.fed(self._next_host, *self._feed.made_s)
            worker = self._idle.popleft()
            worker.send(TargetTask(self._next_host, self._free.popleft()))
            self._next_host = None

    def _take(self) -> HostBatch | None:
        try:
            return self._feed.take()
        except PacelineError:
            raise
        except Exception as error:
            raise StageError(f"stage feed failed: {type(error).__name__}: {error}") from error

    def _account(self) -> None:
        """Idle target workers are starved while buffers are free, blocked while none is."""
        now = time.perf_counter()
        span, self._last_look = now - self._last_look, now
        waits = self._waits["target"]
        share = span * len(self._idle)
        if self._free:
            waits.starved += share
        else:
            waits.blocked += share

    def _forward(self) -> None:
        while True:
            if self._open is None:
                if not self._orders or self._to_save is not None or self._stops_before(self._orders[0]):
                    return
                if self._must_wait(self._orders[0]):
                    return
                self._open = self._orders.popleft()
                self._missing = [(self._open.epoch, index) for index in self._mine(self._open)]
            key = next((key for key in self._candidates(self._open) if key in self._computed), None)
            if key is not None:
                task = self._computed.pop(key)
                self._missing.remove(key)
                if self._open.step:
                    rank = self._open.rank_of(task.host.planned.index, self._num_ranks)
                    self._drafters[rank - self._share.first_rank].send(task)
                else:
                    self._drafters[0].send(HoldForValidation(task.host, task.buffer))
            elif self._missing:
                return
            if not self._missing:
                self._close(self._open)

    def _candidates(self, order: PlannedStep) -> list[Key]:
        """What may be forwarded next: anything of the window, or in plan order the next one of every rank."""
        if self._delivery == "ready" or not order.step:
            return self._missing if order.step else self._missing[:1]
        first_of: dict[int, Key] = {}
        for key in self._missing:
            first_of.setdefault(order.rank_of(key[1], self._num_ranks), key)
        return list(first_of.values())

    def _mine(self, order: PlannedStep) -> list[int]:
        """Micro-batches of a window that this machine's ranks train."""
        if not order.step:
            return list(order.batches)
        return [index for index in order.batches if order.rank_of(index, self._num_ranks) in self._ranks]

    def _close(self, order: PlannedStep) -> None:
        self._open = None
        if not order.step:
            return
        self._closing[order.step] = {}
        self.last_step = order.step
        for worker in self._drafters:
            worker.send(TakeStep(order, self._stop_requested()))
        if self._share.writes and self._saves.due(order):
            self._to_save = order.step

    def _save(self, step: int) -> None:
        """Ranks are equal after every step: the first writes the checkpoint."""
        if not self._share.writes:
            return
        self._to_save = None
        self._num_saving += 1
        self._drafters[0].send(SaveCheckpoint(step, self._saves.announce(step), last=not self._orders))

    def _listen(self) -> Iterator[StepReport]:
        workers = [worker for worker in (*self._targets, *self._drafters) if not worker.lost_peer]
        by_handle: dict[Any, WorkerProcess] = {worker.connection: worker for worker in workers}
        sentinels = {worker.process.sentinel: worker for worker in workers}
        hungry = bool(self._idle) and bool(self._free) and self._next_host is None and not self._feed.finished
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
        elsewhere = self._share.error()
        if elsewhere is not None:
            raise StageError(elsewhere)
        if self._suspect is not None and time.monotonic() > self._suspect[1]:
            raise self._suspect[0]

    def _watch(self, workers: Sequence[WorkerProcess]) -> None:
        for worker in workers:
            limit = self._stall_limit_s if worker.ready else max(self._stall_limit_s, START_LIMIT_S)
            if worker.silent_s() > limit:
                raise StageError(
                    f"stage {worker.name} has shown no progress for {worker.silent_s():.0f} s while working on "
                    f"{worker.doing()}; the limit is flow.stall_limit_s = {self._stall_limit_s:g}"
                    + ("" if worker.ready else f", for start-up at least {START_LIMIT_S:g} s")
                )

    def _receive(self, worker: WorkerProcess) -> Iterator[StepReport]:
        while True:
            try:
                if not worker.connection.poll():
                    return
                reply: Reply = worker.connection.recv()
            except (EOFError, OSError):
                return
            worker.last_heard = time.monotonic()
            yield from self._react(worker, reply)

    def _react(self, worker: WorkerProcess, reply: Reply) -> Iterator[StepReport]:
        payload = reply.payload
        if reply.memory is not None:
            self._sight.memory(worker.name, *reply.memory)
        if isinstance(payload, Ready):
            worker.ready = True
            return
        if isinstance(payload, Failed):
            error = StageError(f"stage {worker.name} failed on {payload.doing}: {payload.error}")
            error.add_note(payload.trace)
            if not payload.peer:
                raise error
            worker.lost_peer = True
            self._suspect = self._suspect or (error, time.monotonic() + PEER_PATIENCE_S)
            return
        task = worker.outstanding.popleft()
        if isinstance(payload, Probed):
            self._sight.probe(payload)
            return
        waits = self._waits["target" if isinstance(payload, FeaturesReady) else "drafter"]
        waits.busy += reply.busy_s
        self._sight.work(worker.name, task, reply)
        self._sight.queues(reply.ended_s, len(self._feed.waiting), len(self._unlearnt()), len(self._free))
        if isinstance(payload, FeaturesReady):
            self._idle.append(worker)
            planned = task.host.planned
            self._computed[(planned.epoch, planned.index)] = DrafterTask(task.host, payload.buffer)
            return
        waits.starved += reply.waited_s
        if isinstance(payload, BufferReleased):
            self._free.append(payload.buffer)
        elif isinstance(payload, StepTaken):
            reports = self._closing[payload.report.step]
            reports[worker.name] = payload.report
            if len(reports) == len(self._drafters):
                del self._closing[payload.report.step]
                self._reported = payload.report.step
                if payload.stop and self._stop_after is None:
                    self._stop_after = self._reported + MAX_STEPS_AHEAD - 1
                yield self._with_waits(reports[self._drafters[0].name])
                if self._to_save == payload.report.step:
                    self._save(self._to_save)
        elif isinstance(payload, CheckpointTaken):
            self._num_saving -= 1
        else:
            raise StageError(f"stage {worker.name} answered {describe(task)} with {type(payload).__name__}")

    def _unlearnt(self) -> list[DrafterTask]:
        """Features that wait: computed and held back, or sent to a drafter that is at something else."""
        sent = (task for worker in self._drafters for task in list(worker.outstanding)[1:])
        return [*self._computed.values(), *(task for task in sent if isinstance(task, DrafterTask))]

    def _with_waits(self, report: StepReport) -> StepReport:
        self._account()
        self._sight.depths(self._feed.waiting, self._unlearnt(), len(self._free))
        waits_s = {
            f"{stage}/{state}": getattr(waits, state)
            for stage, waits in self._waits.items()
            for state in ("busy", "starved", "blocked")
        }
        waits_s |= {f"feed/{state}": seconds for state, seconds in self._feed.spent().items()}
        self._waits = {"target": Waits(), "drafter": Waits()}
        return replace(report, waits_s=waits_s)
