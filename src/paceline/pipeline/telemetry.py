"""What the parent sees of a pipeline: spans of work, queues, memory, and where the time of each stage went."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from paceline.device import peak_allocated_bytes, peak_resident_bytes
from paceline.pipeline.card_sensors import CardSensors
from paceline.pipeline.messages import (
    DrafterTask,
    FeaturesReady,
    Probed,
    Reply,
    SaveCheckpoint,
    TargetTask,
    ValidationTask,
    describe,
)
from paceline.types import HostBatch, StepReport, StepTimes, WorkerTotals

STAGES, STATES = ("target", "drafter"), ("busy", "starved", "blocked")


class Telemetry(Protocol):
    """Takes in what happens, and returns at once; the run's observer is one."""

    def span(self, process: str, row: str, name: str, start_s: float, end_s: float, **details: Any) -> None:
        """Work from ``start_s`` to ``end_s``, both of ``time.time()``."""
        ...

    def counter(self, process: str, name: str, at_s: float, **values: float) -> None:
        """Values at one moment, for a graph over time."""
        ...

    def gauge(self, name: str, value: float) -> None:
        """A value of the metric catalogue that is read rather than counted."""
        ...

    def note(self, text: str) -> None:
        """Something that the user should know."""
        ...


class RemoteObserver:
    """The observer of all machines but the first, whose observer sees the run for all: it drops everything."""

    def span(self, process: str, row: str, name: str, start_s: float, end_s: float, **details: Any) -> None:
        """Dropped."""

    def counter(self, process: str, name: str, at_s: float, **values: float) -> None:
        """Dropped."""

    def gauge(self, name: str, value: float) -> None:
        """Dropped."""

    def note(self, text: str) -> None:
        """Dropped."""

    def warn(self, text: str) -> None:
        """Dropped."""

    def step(self, report: StepReport) -> None:
        """Dropped."""

    def event(self, kind: str, **fields: Any) -> None:
        """Dropped."""

    def newest(self, name: str) -> tuple[int, float] | None:
        """No metric is known here."""
        return None

    def lost(self) -> str | None:
        """Nothing is written here."""
        return None

    def close(self, status: str) -> None:
        """Nothing is open."""


class PeakMemory:
    """Most memory that this process has held, read no more than once in ``every_s`` seconds.

    Args:
        device: of the process; of several, joined by ``+``, the cards are added.
        every_s: between two readings.
    """

    def __init__(self, device: str, every_s: float = 1.0) -> None:
        self._device, self._every_s, self._next = device, every_s, 0.0

    def look(self) -> tuple[int, int] | None:
        """Peak resident bytes of the process, and of its CUDA allocator on its own device; None if not yet due."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + self._every_s
        return peak_resident_bytes(), peak_allocated_bytes(self._device)


class TimeAccount:
    """Where the time of the stages went since the step before.

    A target worker without work is *starved* while a buffer is free for it, and *blocked* while none is. `book` must be
    called before either changes, so that each span is booked to the state in which it was spent. What a drafter rank
    waited, it measures itself.

    Args:
        workers: keys of all workers, such as ``target_0``.
    """

    def __init__(self, workers: Iterable[str]) -> None:
        self._workers = list(workers)
        self.begin()

    def begin(self) -> None:
        """Training begins here, or the next step does."""
        self._since = time.perf_counter()
        self._seconds = {f"{stage}/{state}": 0.0 for stage in STAGES for state in STATES}
        self._done = dict.fromkeys(self._workers, WorkerTotals())

    def book(self, *, idle: int, blocked: bool) -> None:
        """The span since the last call: so many target workers had no work, and no buffer was free if blocked."""
        now = time.perf_counter()
        self._seconds["target/blocked" if blocked else "target/starved"] += idle * (now - self._since)
        self._since = now

    def work(self, worker: str, task: Any, reply: Reply) -> None:
        """A worker has finished a task."""
        stage = "target" if isinstance(reply.payload, FeaturesReady) else "drafter"
        self._seconds[f"{stage}/busy"] += reply.busy_s
        if stage == "drafter":
            self._seconds["drafter/starved"] += reply.waited_s
        done, counts = self._done[worker], isinstance(task, (TargetTask, DrafterTask))
        tokens = task.host.planned.real_tokens if counts else 0
        self._done[worker] = WorkerTotals(done.batches + counts, done.real_tokens + tokens, done.busy_s + reply.busy_s)

    def take(self, feed: dict[str, float]) -> StepTimes:
        """The times of the step that has just been taken; the next one begins.

        Args:
            feed: seconds of the prefetch thread by state.
        """
        waits_s = self._seconds | {f"feed/{state}": seconds for state, seconds in feed.items()}
        workers = self._done
        self.begin()
        return StepTimes(waits_s, workers)


class PipelineTelemetry:
    """Turns what happens at the coordinator into spans, counters and gauges.

    Args:
        telemetry: takes them in.
        buffer_bytes, token_bytes: size of one buffer of the pool, and of one token's features in it.
        devices: of each worker by its key.
    """

    def __init__(self, telemetry: Telemetry, buffer_bytes: int, token_bytes: int, devices: Mapping[str, str]) -> None:
        self._telemetry, self._sensors = telemetry, CardSensors(devices)
        self._buffer_bytes, self._token_bytes = buffer_bytes, token_bytes
        self._memory: dict[str, float] = {}
        self._transport_noted = False

    def probed(self, probed: Probed) -> None:
        """One of the largest batches fits; what its features lost in transport is noted once."""
        if probed.error and not self._transport_noted:
            self._transport_noted = True
            self._telemetry.note(f"features cross with a relative RMS error of {probed.error:.2g} (flow.transport)")

    def fed(self, host: HostBatch, began_s: float, ended_s: float) -> None:
        """A host batch was made."""
        name, samples = f"batch {host.planned.index}", len(host.lengths)
        self._telemetry.span("feed", "host batches", name, began_s, ended_s, samples=samples)

    def work(self, worker: str, task: Any, reply: Reply) -> None:
        """A worker has finished a task."""
        started_s, ended_s = reply.ended_s - reply.busy_s, reply.ended_s
        if isinstance(task, (TargetTask, DrafterTask, ValidationTask)):
            planned = task.host.planned
            details = {"bucket": planned.bucket, "samples": len(planned.rows), "real_tokens": planned.real_tokens}
            name = f"{'validation ' * isinstance(task, ValidationTask)}batch {planned.index}"
            place = {"buffer": task.buffer, "window": planned.window}
            self._telemetry.span(worker, "work", name, started_s, ended_s, **place, **details)
        else:
            rows = ("checkpoint", worker) if isinstance(task, SaveCheckpoint) else (worker, "work")
            self._telemetry.span(*rows, describe(task), started_s, ended_s)

    def queues(self, at_s: float, host_batches: int, features: int, free_buffers: int) -> None:
        """How much waits at one moment."""
        items = {"host_batches": host_batches, "features": features, "free_buffers": free_buffers}
        self._telemetry.counter("queues", "items", at_s, **items)

    def memory(self, worker: str, resident: int, allocated: int) -> None:
        """Peak memory of a worker, by its key."""
        self._memory |= dict.fromkeys((f"memory_peak/{worker}_bytes", f"worker/{worker}/memory_bytes"), resident)
        if allocated:
            names = (f"memory_peak/{worker}_gpu_bytes", f"worker/{worker}/gpu_memory_bytes")
            self._memory |= dict.fromkeys(names, allocated)

    def depths(self, hosts: Sequence[HostBatch], features: Sequence[DrafterTask], free: int) -> None:
        """What waits at the end of a step, the memory known so far, and what the cards' sensors say."""
        for name, value in {**self._memory, **self._sensors.look()}.items():
            self._telemetry.gauge(name, value)
        tokens = sum(task.host.planned.real_tokens for task in features)
        for queue, items, size in (
            ("host_batches", len(hosts), sum(host.num_bytes() for host in hosts)),
            ("features", len(features), tokens * self._token_bytes),
            ("free_buffers", free, free * self._buffer_bytes),
        ):
            self._telemetry.gauge(f"queue/{queue}_items", items)
            self._telemetry.gauge(f"queue/{queue}_bytes", size)
