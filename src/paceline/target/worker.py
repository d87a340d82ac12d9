"""The worker of one target device: host batches in, features into a buffer of the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.config import TargetConfig
from paceline.flow.messages import FeaturesReady, TargetTask
from paceline.flow.pool import BufferPool
from paceline.target.guard import guard_first_batch

GUARD_EVERY = 64
"""Batches between two checks of what a worker hands over."""


class TargetStage:
    """Runs the frozen target on one device, under the tap guard.

    The first batch is guarded by running pieces of it again, then every `GUARD_EVERY`-th is checked as it stands.

    Args:
        settings: the target.
        taps: tapped layers.
        device: where it runs.
        pool: buffers that features are written into.
    """

    def __init__(self, settings: TargetConfig, taps: Sequence[int], device: str, pool: BufferPool) -> None:
        from paceline.target.load import load_target

        self._target = load_target(settings, taps, device)
        self._pool = pool
        self._guarded = False
        self._handled = 0

    def handle(self, message: TargetTask) -> Iterator[FeaturesReady]:
        """Features of the batch's real tokens, [S, N·H], into the task's buffer."""
        tokens = int(message.host.lengths.sum())
        last = self._pool.last_view(message.buffer, tokens)
        features = self._pool.view(message.buffer, tokens)
        batch = self._target.features(message.host, out=features, with_last=last is not None)
        if last is not None and batch.last_hidden is not None:
            last.copy_(batch.last_hidden)
        from paceline.target.guard import check_features

        if self._handled == 0:
            guard_first_batch(self._target, batch)
        elif self._handled % GUARD_EVERY == 0:
            check_features(batch, self._target.taps, self._target.facts.hidden_size)
        self._handled += 1
        yield FeaturesReady(message.buffer)
