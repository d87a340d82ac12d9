"""The worker of one drafter device: features in, optimizer steps and checkpoints out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from paceline.contracts import FeatureBatch
from paceline.drafter.learner import Learner
from paceline.flow.messages import (
    BufferReleased,
    CloseWindow,
    DrafterTask,
    SaveState,
    StateSaved,
    WindowClosed,
)
from paceline.flow.pool import BufferPool


class DrafterStage:
    """Trains the drafter on one device.

    Args:
        build: makes the learner, with the state of a checkpoint where the run goes on.
        pool: buffers that features are read from.
        save: writes a checkpoint: ``save(step, state)``.
    """

    def __init__(
        self, build: Callable[[], Learner], pool: BufferPool, save: Callable[[int, dict[str, Any]], None]
    ) -> None:
        self._learner = build()
        self._pool, self._save = pool, save
        self._step_ended = time.perf_counter()

    def handle(self, message: Any) -> Iterator[Any]:
        """Accumulate a batch, close a window, or write a checkpoint."""
        if isinstance(message, DrafterTask):
            tokens = int(message.host.lengths.sum())
            features, last = self._pool.view(message.buffer, tokens), self._pool.last_view(message.buffer, tokens)
            self._learner.accumulate(FeatureBatch(message.host, features, last))
            yield BufferReleased(message.buffer)
        elif isinstance(message, CloseWindow):
            order, now = message.order, time.perf_counter()
            report = self._learner.step(
                step=order.step, epoch=order.epoch, window=order.window, seconds=now - self._step_ended, waits_s={}
            )
            self._step_ended = time.perf_counter()
            yield WindowClosed(report)
        elif isinstance(message, SaveState):
            self._save(message.step, self._learner.state_dict())
            yield StateSaved(message.step)
