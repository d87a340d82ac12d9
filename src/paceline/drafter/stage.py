"""The stage of one drafter device: features in, optimizer steps and checkpoints out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.device import Mark, device_errors, on_stream, side_stream, stream_waits, used_by_compute
from paceline.drafter.distributed import any_rank, check_equal
from paceline.drafter.host_copy import StateWriter
from paceline.drafter.learner import Learner
from paceline.drafter.memory import optimizer_bytes
from paceline.errors import DrafterError
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.messages import (
    BufferReleased,
    BuildDrafter,
    CheckpointTaken,
    DrafterBuilt,
    DrafterTask,
    MemoryProbe,
    Probed,
    SaveCheckpoint,
    StepTaken,
    TakeStep,
    ValidationTask,
)
from paceline.pipeline.process import Stage
from paceline.pipeline.profiler import StepProfile
from paceline.types import FeatureBatch, HostBatch, SharedWeights

BUILT = (
    "out of memory while {}; lower plan.token_budget or drafter.num_layers, or set optimizer.shard for several ranks"
)
"""What was made, when memory did not suffice at the start."""


class DrafterStage(Stage):
    """Trains the drafter on one device. The first message is `BuildDrafter`.

    Args:
        build: makes the learner on weights of the target, with the state of a checkpoint where the run continues.
        pool: buffers that features are read from.
        writer: writes checkpoints; None for a rank that does not.
        profile: steps that are profiled.
        last_step: of the run.
        several_machines: whether ranks tell one another that a user has asked to stop.
    """

    def __init__(
        self,
        build: Callable[[SharedWeights], Learner],
        pool: FeaturePool,
        writer: StateWriter | None,
        profile: StepProfile | None = None,
        last_step: int = 0,
        several_machines: bool = False,
    ) -> None:
        self._build = build
        self._profile, self._last_step = profile, last_step
        self._several_machines = several_machines
        self._pool, self._writer = pool, writer

    def _begin(self, weights: SharedWeights) -> None:
        with device_errors(DrafterError, lambda: BUILT.format("the drafter is made")):
            self._learner = self._build(weights)
        self._copies = side_stream(self._learner.device)
        self._pool.pin(self._learner.device)
        rooms = 0 if self._copies is None else 2  # one is filled while the other is trained on
        with device_errors(DrafterError, lambda: BUILT.format("room for two batches of features is made")):
            self._rooms = deque(self._pool.room_on(self._learner.device) for _ in range(rooms))

    def handle(self, message: Any) -> Iterator[Any]:
        """Accumulate a batch, close a window, write a checkpoint; before training, begin, try a batch or keep one."""
        if isinstance(message, BuildDrafter):
            self._begin(message.weights)
            yield DrafterBuilt()
        elif isinstance(message, DrafterTask):
            if self._profile is not None:
                self._profile.before(self._learner.steps_done + 1)
            self._within_memory(self._learner.accumulate, message)
            yield BufferReleased(message.buffer)
        elif isinstance(message, MemoryProbe):
            self._within_memory(self._learner.probe, message)
            yield Probed()
        elif isinstance(message, ValidationTask):
            self._within_memory(self._learner.hold_for_validation, message)
            yield BufferReleased(message.buffer)
        elif isinstance(message, TakeStep):
            if self._writer is not None:
                self._writer.check()
            with device_errors(DrafterError, lambda: out_of_memory_in_step(self._learner)):
                report = self._learner.step(message.planned)
            if self._profile is not None:
                self._profile.after(message.planned.step, last=message.planned.step == self._last_step)
            yield StepTaken(report, self._agree(message))
        elif isinstance(message, SaveCheckpoint):
            if self._writer is None:
                self._learner.state_dict()  # takes part where ranks share the optimizer's state out
            else:
                self._learner.save(self._writer, message.step, message.note)
                if message.last:
                    self._writer.wait()
            yield CheckpointTaken(message.step)

    def _kept(self, message: ValidationTask) -> FeatureBatch:
        """A copy in the host's memory: on a card, validation would take gigabytes for the whole run.

        What crosses in fewer bits is made whole on the card, where that takes no time.
        """
        batch = self._fetch(message)
        last = None if batch.last_hidden is None else _host_copy(batch.last_hidden)
        return replace(batch, features=_host_copy(batch.features), last_hidden=last)

    def _fetch(self, message: DrafterTask | ValidationTask | MemoryProbe) -> FeatureBatch:
        """The features of a task's buffer: a view of it on CPUs; on a GPU a copy, made beside what computes there."""
        device, tokens = self._learner.device, int(message.host.lengths.sum())
        if self._copies is None:
            return FeatureBatch(message.host, *self._pool.read(message.buffer, tokens))
        room = self._rooms[0]
        if room.free is not None:
            stream_waits(self._copies, room.free)
        with on_stream(self._copies):
            features, last = self._pool.read(message.buffer, tokens, room)
        # The buffer is handed back once the copy has been made, whatever is still computing.
        self._copies.synchronize()
        for moved in (features, last):
            if moved is not None:
                used_by_compute(moved, device)
        return FeatureBatch(message.host, features, last)

    def _within_memory(
        self, work: Callable[[FeatureBatch], None], message: DrafterTask | ValidationTask | MemoryProbe
    ) -> None:
        """Do the work on a task's batch; say what to lower where it does not fit."""
        with device_errors(DrafterError, lambda: out_of_memory(self._learner, message.host)):
            work(self._kept(message) if isinstance(message, ValidationTask) else self._fetch(message))
        if self._rooms:
            self._rooms[0].free = Mark(self._learner.device)
            self._rooms.rotate(1)

    def _agree(self, message: TakeStep) -> bool:
        """With all ranks: that their weights are equal, and whether to stop."""
        world = self._learner.world
        if world is None:
            return message.stop
        if message.planned.save:
            check_equal(self._learner.parameters, world)
        if not self._several_machines:
            return message.stop
        return any_rank(message.stop, world, self._learner.device)


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu").copy_(tensor)


def out_of_memory(learner: Learner, host: HostBatch) -> str:
    """What a batch needs for which the drafter's device has no room, and what to set."""
    planned, spec, limit = host.planned, learner.spec, learner.settings.positions_per_pass
    features = planned.real_tokens * len(spec.taps) * spec.hidden_size * learner.dtype.itemsize
    at_once = planned.draft_positions if limit is None else min(limit, planned.draft_positions)
    return (
        f"out of memory on {learner.device} with {planned.draft_positions} draft positions ({at_once} at once) over "
        f"{planned.real_tokens} tokens ({planned.padded_tokens} padded tokens): features {features / 2**20:,.0f} MiB; "
        f"lower drafter.positions_per_pass (now {'unset' if limit is None else limit}), drafter.head_chunk or "
        "plan.token_budget, or set drafter.recompute"
    )


def out_of_memory_in_step(learner: Learner) -> str:
    """What an optimizer step needs for which the drafter's device has no room, and what to set."""
    masters = sum(parameter.nbytes for parameter in learner.parameters)
    state = optimizer_bytes(learner.spec, learner.optimizer_settings)
    return (
        f"out of memory on {learner.device}: masters and gradients {2 * masters / 2**20:,.0f} MiB, optimizer state "
        f"{state / 2**20:,.0f} MiB; lower drafter.positions_per_pass, or set optimizer.state to 8bit, or "
        "optimizer.shard where there are several ranks"
    )
