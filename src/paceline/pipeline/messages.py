"""What travels between the coordinator and its workers: the target's weights for the drafter once, then no tensors.

A buffer of the pool is named by its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.types import HostBatch, PlannedStep, SharedWeights, StepReport


@dataclass(frozen=True, slots=True)
class ShareWeights:
    """For the first target worker, before all else: hand over what drafters take over from the target."""


@dataclass(frozen=True, slots=True)
class WeightsShared:
    """From a target worker: what drafters take over, in shared memory."""

    weights: SharedWeights


@dataclass(frozen=True, slots=True)
class BuildDrafter:
    """For a drafter rank, before all else: build the drafter on these weights of the target."""

    weights: SharedWeights


@dataclass(frozen=True, slots=True)
class DrafterBuilt:
    """From a drafter rank: built, with the state that the run starts from."""


@dataclass(frozen=True, slots=True)
class MemoryProbe:
    """For any worker, before training: run one of the largest planned batches, so that what does not fit shows now.

    A target writes the batch's features into the buffer, a drafter rank reads them there. Nothing is trained.
    """

    host: HostBatch
    buffer: int


@dataclass(frozen=True, slots=True)
class Probed:
    """From a worker: the batch fits.

    Attributes:
        error: relative RMS error of its features after transport; 0 from a drafter rank.
    """

    error: float = 0.0


@dataclass(frozen=True, slots=True)
class TargetTask:
    """For a target worker: run this batch and write its features into the buffer."""

    host: HostBatch
    buffer: int


@dataclass(frozen=True, slots=True)
class FeaturesReady:
    """From a target worker: the buffer holds the features of its task."""

    buffer: int


@dataclass(frozen=True, slots=True)
class ValidationTask:
    """For any worker, before training: a held-out batch, which every validation measures.

    A target writes its features into the buffer, a drafter rank keeps them.
    """

    host: HostBatch
    buffer: int


@dataclass(frozen=True, slots=True)
class DrafterTask:
    """For a drafter rank: learn from this batch, whose features are in the buffer."""

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
        planned: the step.
        stop: whether the user has asked this machine to stop; the ranks tell one another.
    """

    planned: PlannedStep
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


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker: started and waiting for work."""


@dataclass(frozen=True, slots=True)
class Failed:
    """From a worker: it raised.

    Attributes:
        doing: what it was working on.
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
        busy_s: time of work since the reply before; on a GPU, of its queue.
        ended_s: when the work ended, of ``time.time()``.
        memory: peak bytes of the process and of its CUDA allocator; None where they were not read.
    """

    payload: Any
    waited_s: float = 0.0
    busy_s: float = 0.0
    ended_s: float = 0.0
    memory: tuple[int, int] | None = None


START_UP = "start-up"
"""What a worker does before its first batch."""


def describe(message: Any) -> str:
    """A task as a user reads it in an error: its batch and samples, or its step."""
    if isinstance(message, (TargetTask, DrafterTask)):
        return batch_name(message.host)
    if isinstance(message, ValidationTask):
        return f"validation {batch_name(message.host)}"
    if isinstance(message, MemoryProbe):
        return f"the memory probe, {batch_name(message.host)}"
    if isinstance(message, TakeStep):
        return f"optimizer step {message.planned.step}"
    if isinstance(message, SaveCheckpoint):
        return f"checkpoint of step {message.step}"
    return START_UP


def batch_name(host: HostBatch) -> str:
    """A batch as a user reads it in an error."""
    planned = host.planned
    rows = [int(row) for row in planned.rows[:6]]
    more = f" and {len(planned.rows) - 6} more" if len(planned.rows) > 6 else ""
    return f"batch {planned.index} of epoch {planned.epoch} (samples {', '.join(map(str, rows))}{more})"


ToTarget = ShareWeights | TargetTask | ValidationTask | MemoryProbe
"""What a target worker is sent."""
FromTarget = WeightsShared | FeaturesReady | Probed
"""What it answers."""
