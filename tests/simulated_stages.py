"""Stages with settable behavior, for tests of the coordinator: real processes and pipes, no models."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.messages import (
    BufferReleased,
    BuildDrafter,
    CheckpointTaken,
    DrafterBuilt,
    DrafterTask,
    FeaturesReady,
    MemoryProbe,
    Probed,
    SaveCheckpoint,
    ShareWeights,
    StepTaken,
    TakeStep,
    ValidationTask,
    WeightsShared,
)
from paceline.pipeline.process import Stage
from paceline.types import Ratio, SharedWeights, StepReport


class SimulatedTarget(Stage):
    """Writes the sum of a batch's tokens into the buffer after a random delay; misbehaves on one batch when told."""

    def __init__(self, pool: FeaturePool, seed: int, most_delay_s: float, error: str = "", error_at: int = -1) -> None:
        self.pool, self.random, self.most_delay_s = pool, random.Random(seed), most_delay_s
        self.error, self.error_at = error, error_at

    def handle(self, message: Any) -> Iterator[Any]:
        if isinstance(message, ShareWeights):
            yield WeightsShared(SharedWeights(torch.full((2,), 3.0), torch.full((2,), 5.0)))
            return
        if isinstance(message, MemoryProbe):
            if self.error == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            self.pool.view(message.buffer, 1).fill_(float(message.host.ids.sum()))
            yield Probed(0.25)
            return
        index = message.host.planned.index
        if index == self.error_at:
            misbehave(self.error)
        time.sleep(self.random.random() * self.most_delay_s)
        self.pool.view(message.buffer, 1).fill_(float(message.host.ids.sum()))
        yield FeaturesReady(message.buffer)


class SimulatedDrafter(Stage):
    """Notes what it was given, in order; checks that each buffer holds its own batch's features."""

    def __init__(self, pool: FeaturePool, seed: int, most_delay_s: float, error: str = "", error_at: int = -1) -> None:
        self.pool, self.random, self.most_delay_s = pool, random.Random(seed), most_delay_s
        self.error, self.error_at = error, error_at
        self.trained: list[int] = []
        self.held: list[int] = []
        self.probed: list[int] = []

    def handle(self, message: Any) -> Iterator[Any]:
        if isinstance(message, BuildDrafter):
            self.weights = message.weights
            yield DrafterBuilt()
        elif isinstance(message, (DrafterTask, ValidationTask, MemoryProbe)):
            if [float(self.weights.embedding.sum()), float(self.weights.head.sum())] != [6.0, 10.0]:
                raise ValueError("other weights than the target handed over")
            index = message.host.planned.index
            if index == self.error_at:
                misbehave(self.error)
            time.sleep(self.random.random() * self.most_delay_s)
            found = float(self.pool.view(message.buffer, 1)[0, 0])
            if found != float(message.host.ids.sum()):
                raise ValueError(f"buffer {message.buffer} holds {found}, not batch {index}")
            if isinstance(message, MemoryProbe):
                self.probed.append(index)
                yield Probed()
                return
            (self.trained if isinstance(message, DrafterTask) else self.held).append(index)
            yield BufferReleased(message.buffer)
        elif isinstance(message, TakeStep):
            trained, self.trained = self.trained, []
            yield StepTaken(report(message.planned, trained, self.probed, self.held))
        elif isinstance(message, SaveCheckpoint):
            if self.trained:
                raise ValueError(f"checkpoint of step {message.step} inside a window")
            yield CheckpointTaken(message.step)


def misbehave(error: str) -> None:
    """Raise, hang or die."""
    if error == "raise":
        raise ValueError("a made-up error\nwith a second line")
    if error == "hang":
        time.sleep(3600)
    if error == "slow":
        time.sleep(1.0)
    if error == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def cannot_start(*_: Any) -> None:
    """A factory that fails."""
    raise OSError("no such device")


def note_pid(path: str) -> SimulatedTarget:
    """A factory that tells its process number."""
    pool = FeaturePool(1, 1, 1, __import__("torch").float32)
    Path(path).write_text(str(os.getpid()))
    return SimulatedTarget(pool, 0, 0.0)


def report(planned: Any, trained: list[int], probed: list[int], held: list[int]) -> StepReport:
    """A step report with nothing but its batches, and those that were probed and held before."""
    return StepReport(
        step=planned.step,
        epoch=planned.epoch,
        window=planned.window,
        loss=Ratio(1.0, 1.0),
        ratios={f"probed_{index}": Ratio(1.0, 1.0) for index in probed}
        | {f"held_{index}": Ratio(1.0, 1.0) for index in held},
        buckets={},
        batches=trained,
        gradient_norm=0.0,
        clipped=False,
        skipped=False,
        learning_rate=0.0,
        samples=0,
        anchors=0,
        real_tokens=0,
        padded_tokens=0,
        draft_positions=0,
        seconds=0.0,
    )
