"""The worker of one drafter device: features in, optimizer steps and checkpoints out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from paceline.drafter.distributed import any_asks, check_equal
from paceline.drafter.learner import Learner
from paceline.errors import DrafterError
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.messages import (
    BufferReleased,
    CheckpointTaken,
    DrafterTask,
    HoldForValidation,
    SaveCheckpoint,
    StepTaken,
    TakeStep,
)
from paceline.pipeline.profiler import StepProfile
from paceline.types import FeatureBatch, Ratio, StepReport


def with_validation(report: StepReport, found: Mapping[str, Ratio]) -> StepReport:
    """The report with the metrics of the validation batches under ``validation/``."""
    named = {f"validation/{name}": ratio for name, ratio in found.items()}
    return replace(report, ratios={**report.ratios, **named})


class Keep(Protocol):
    """Writes the learner's state in the background, one after another."""

    def spare(self) -> dict[str, Any] | None:
        """The state that was written last, whose memory may be used again; waits until it is written."""
        ...

    def put(self, step: int, state: dict[str, Any], note: Mapping[str, Any]) -> None:
        """Begin to write the state after a step."""
        ...

    def check(self) -> None:
        """Raise what has gone wrong since the last look; never waits."""
        ...

    def wait(self) -> None:
        """Until everything is on disk, or raise."""
        ...


class DrafterStage:
    """Trains the drafter on one device.

    Args:
        build: makes the learner, with the state of a checkpoint where the run goes on.
        pool: buffers that features are read from.
        keep: writes the state.
        profile: steps that are profiled.
        last_step: of the run.
        several_machines: whether ranks must hear of stops that users ask for elsewhere.
    """

    def __init__(
        self,
        build: Callable[[], Learner],
        pool: FeaturePool,
        keep: Keep,
        profile: StepProfile | None = None,
        last_step: int = 0,
        several_machines: bool = False,
    ) -> None:
        self._learner = build()
        self._copies = None
        if self._learner.device.type == "cuda":
            self._copies = torch.cuda.Stream(self._learner.device)
            pool.pin()
        self._profile, self._last_step = profile, last_step
        self._several_machines = several_machines
        self._pool, self._keep = pool, keep
        self._step_ended = time.perf_counter()
        self._validation: list[FeatureBatch] = []

    def handle(self, message: Any) -> Iterator[Any]:
        """Accumulate a batch, close a window, or write a checkpoint."""
        if isinstance(message, (DrafterTask, HoldForValidation)):
            if self._profile is not None:
                self._profile.before(self._learner.steps_done + 1)
            batch = self._fetch(message)
            if isinstance(message, HoldForValidation):
                kept = None if batch.last_hidden is None else batch.last_hidden.clone()
                self._validation.append(FeatureBatch(message.host, batch.features.clone(), kept))
            else:
                self._accumulate(batch)
            yield BufferReleased(message.buffer)
        elif isinstance(message, TakeStep):
            self._keep.check()
            order, now = message.order, time.perf_counter()
            report = self._learner.step(
                step=order.step, epoch=order.epoch, window=order.window, seconds=now - self._step_ended, waits_s={}
            )
            if order.validate and self._validation:
                report = with_validation(report, self._learner.validate(self._validation))
            if self._profile is not None:
                self._profile.after(order.step, last=order.step == self._last_step)
            self._step_ended = time.perf_counter()
            yield StepTaken(report, self._agree(message))
        elif isinstance(message, SaveCheckpoint):
            self._keep.put(message.step, self._learner.state_dict(self._keep.spare()), message.note)
            if message.last:
                self._keep.wait()
            yield CheckpointTaken(message.step)

    def _fetch(self, message: DrafterTask | HoldForValidation) -> FeatureBatch:
        """The features of a task's buffer: a view of it on CPUs; on a GPU a copy, made beside what computes there."""
        tokens = int(message.host.lengths.sum())
        if self._copies is None:
            last = self._pool.last_view(message.buffer, tokens)
            return FeatureBatch(message.host, self._pool.read(message.buffer, tokens), last)
        device = self._learner.device
        with torch.cuda.stream(self._copies):
            features = self._pool.read(message.buffer, tokens).to(device, non_blocking=True)
            last = self._pool.last_view(message.buffer, tokens)
            last = None if last is None else last.to(device, non_blocking=True)
        # The buffer is handed back once the copy has been made, whatever is still computing.
        self._copies.synchronize()
        for moved in (features, last):
            if moved is not None:
                moved.record_stream(torch.cuda.current_stream(device))
        return FeatureBatch(message.host, features, last)

    def _accumulate(self, batch: FeatureBatch) -> None:
        try:
            self._learner.accumulate(batch)
        except (torch.OutOfMemoryError, MemoryError) as error:
            planned = batch.host.planned
            raise DrafterError(
                f"out of memory on {self._learner.device} with {planned.draft_positions} draft positions over "
                f"{planned.real_tokens} tokens (features {batch.features.nbytes / 2**20:,.0f} MiB); lower "
                "drafter.positions_per_pass, drafter.head_chunk or plan.draft_position_budget"
            ) from error

    def _agree(self, message: TakeStep) -> bool:
        """With all ranks: that their weights are equal, and whether to stop."""
        world = self._learner.world
        if world is None:
            return message.stop
        if message.order.save:
            check_equal(self._learner.optimizer.parameters, world)
        return any_asks(message.stop, world) if self._several_machines else message.stop
