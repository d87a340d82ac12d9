"""What travels between the hub and its workers. Tensors never do: a buffer of the pool is named by its number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.types import HostBatch, PlannedStep, StepReport


@dataclass(frozen=True, slots=True)
class TargetTask:
    """For a target worker: run this batch and write its features into the buffer."""

    host: HostBatch
    buffer: int


@dataclass(frozen=True, slots=True)
class MemoryProbe:
    """For a target worker, before all others: run the largest planned batch, so that what does not fit shows now."""

    host: HostBatch
    buffer: int = 0


@dataclass(frozen=True, slots=True)
class Probed:
    """From a target worker: the largest batch fits.

    Attributes:
        error: relative RMS error of its features after transport.
        peak_bytes: of the CUDA allocator; 0 on CPUs.
    """

    error: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class FeaturesReady:
    """From a target worker: the buffer holds the features of its task."""

    buffer: int


@dataclass(frozen=True, slots=True)
class DrafterTask:
    """For a drafter rank: learn from this batch, whose features are in the buffer."""

    host: HostBatch
    buffer: int


@dataclass(frozen=True, slots=True)
class HoldForValidation:
    """For a drafter rank: keep this batch and its features for validation."""

    host: HostBatch
    buffer: int


@dataclass(frozen=True, slots=True)
class BufferReleased:
    """From a drafter rank: the buffer may be used again."""

    buffer: int


@dataclass(frozen=True, slots=True)
class TakeStep:
    """For a drafter rank: all micro-batches of the window were sent; take the optimizer step.

    Attributes:
        order: the step.
        stop: whether the user has asked this machine to stop; the ranks tell one another.
    """

    order: PlannedStep
    stop: bool = False


@dataclass(frozen=True, slots=True)
class StepTaken:
    """From a drafter rank: the step was taken; ``stop``: on some machine the user has asked to stop."""

    report: StepReport
    stop: bool = False


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """For a drafter rank: take the state after this step and write it as a checkpoint.

    Attributes:
        step: optimizer steps done.
        note: plain values that go into the checkpoint.
        last: whether to answer only when it is on disk, because nothing follows.
    """

    step: int
    note: Mapping[str, Any] = field(default_factory=dict)
    last: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointTaken:
    """From a drafter rank: the state was taken and is being written; after the last one, it is on disk."""

    step: int


class Saves(Protocol):
    """Says in the parent when the state is written."""

    def due(self, order: PlannedStep) -> bool:
        """Whether a checkpoint follows this step; asked once a step, when its window closes."""
        ...

    def announce(self, step: int) -> Mapping[str, Any]:
        """Called when the step's report is taken in and before its state is; gives the note of the checkpoint."""
        ...


class PlannedSaves:
    """A checkpoint where the order says so, with an empty note."""

    def due(self, order: PlannedStep) -> bool:
        """As planned."""
        return order.save

    def announce(self, step: int) -> Mapping[str, Any]:
        """Nothing to note."""
        return {}


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker: built and waiting for work."""


@dataclass(frozen=True, slots=True)
class Failed:
    """From a worker: it raised.

    Attributes:
        doing: what it was working on, in words.
        error: one line.
        trace: the traceback, for the log.
        peer: whether it only noticed that another rank is gone.
    """

    doing: str
    error: str
    trace: str
    peer: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """For a worker: finish and leave."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's message with its times.

    Attributes:
        payload: one of the messages above.
        waited_s: time without work since the reply before.
        busy_s: time of work since the reply before.
        ended_s: when the work ended, of ``time.time()``.
        memory: peak bytes of the process and of its CUDA allocator; None where they were not looked at.
    """

    payload: Any
    waited_s: float = 0.0
    busy_s: float = 0.0
    ended_s: float = 0.0
    memory: tuple[int, int] | None = None


def describe(message: Any) -> str:
    """A task in words, for errors: batch and samples."""
    if isinstance(message, (TargetTask, DrafterTask, HoldForValidation)):
        planned = message.host.planned
        rows = [int(row) for row in planned.rows[:6]]
        more = f" and {len(planned.rows) - 6} more" if len(planned.rows) > 6 else ""
        kind = "batch" if planned.epoch >= 0 else "validation batch"
        where = f" of epoch {planned.epoch}" if planned.epoch >= 0 else ""
        return f"{kind} {planned.index}{where} (samples {', '.join(map(str, rows))}{more})"
    if isinstance(message, MemoryProbe):
        return f"the memory probe, {describe(TargetTask(message.host, message.buffer))}"
    if isinstance(message, TakeStep):
        return f"optimizer step {message.order.step}"
    if isinstance(message, SaveCheckpoint):
        return f"checkpoint of step {message.step}"
    return "start-up"
