"""What the hub sees, as its witness is told: spans of work, depths of queues, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.pipeline.messages import (
    DrafterTask,
    HoldForValidation,
    Probed,
    Reply,
    SaveCheckpoint,
    TargetTask,
    describe,
)
from paceline.pipeline.telemetry import Telemetry
from paceline.types import HostBatch


class PipelineTelemetry:
    """Turns what happens at the hub into what a witness takes in.

    Args:
        witness: is told.
        buffer_bytes, token_bytes: size of one buffer of the pool, and of one token's features in it.
    """

    def __init__(self, witness: Telemetry, buffer_bytes: int, token_bytes: int) -> None:
        self._witness = witness
        self._buffer_bytes, self._token_bytes = buffer_bytes, token_bytes
        self._memory: dict[str, int] = {}
        self._told_of_transport = False

    def probe(self, probed: Probed) -> None:
        """The largest batch went through: what its features lost on the way is told once."""
        if probed.error and not self._told_of_transport:
            self._told_of_transport = True
            self._witness.note(f"features cross with a relative RMS error of {probed.error:.2g} (flow.transport)")

    def fed(self, host: HostBatch, began_s: float, ended_s: float) -> None:
        """A host batch was made."""
        name, samples = f"batch {host.planned.index}", len(host.lengths)
        self._witness.span("feed", "host batches", name, began_s, ended_s, samples=samples)

    def work(self, worker: str, task: Any, reply: Reply) -> None:
        """A worker has done a task."""
        started_s, ended_s = reply.ended_s - reply.busy_s, reply.ended_s
        if isinstance(task, (TargetTask, DrafterTask, HoldForValidation)):
            planned = task.host.planned
            details = {"bucket": planned.bucket, "samples": len(planned.rows), "real_tokens": planned.real_tokens}
            name, more = f"batch {planned.index}", {"buffer": task.buffer, "window": planned.window}
            self._witness.span(worker, "work", name, started_s, ended_s, **more, **details)
        else:
            place = ("checkpoint", worker) if isinstance(task, SaveCheckpoint) else (worker, "work")
            self._witness.span(*place, describe(task), started_s, ended_s)

    def queues(self, at_s: float, host_batches: int, features: int, free_buffers: int) -> None:
        """How much waits at one moment."""
        items = {"host_batches": host_batches, "features": features, "free_buffers": free_buffers}
        self._witness.counter("queues", "items", at_s, **items)

    def memory(self, worker: str, resident: int, allocated: int) -> None:
        """Peak memory of a worker."""
        name = worker.partition(" (")[0].replace(" ", "_")
        self._memory[f"memory_peak/{name}_bytes"] = resident
        if allocated:
            self._memory[f"memory_peak/{name}_gpu_bytes"] = allocated

    def depths(self, hosts: Sequence[HostBatch], features: Sequence[DrafterTask], free: int) -> None:
        """What waits at the end of a step, and the memory known so far."""
        for name, size in self._memory.items():
            self._witness.gauge(name, size)
        tokens = sum(task.host.planned.real_tokens for task in features)
        for queue, items, size in (
            ("host_batches", len(hosts), sum(host.num_bytes() for host in hosts)),
            ("features", len(features), tokens * self._token_bytes),
            ("free_buffers", free, free * self._buffer_bytes),
        ):
            self._witness.gauge(f"queue/{queue}_items", items)
            self._witness.gauge(f"queue/{queue}_bytes", size)
