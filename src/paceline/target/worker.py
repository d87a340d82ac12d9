"""The worker of one target device: host batches in, features into a buffer of the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.config import TargetConfig
from paceline.flow.messages import FeaturesReady, TargetTask
from paceline.flow.pool import BufferPool


class TargetStage:
    """Runs the frozen target on one device.

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

    def handle(self, message: TargetTask) -> Iterator[FeaturesReady]:
        """Features of the batch's real tokens, [S, N·H], into the task's buffer."""
        tokens = int(message.host.lengths.sum())
        self._target.features(message.host, out=self._pool.view(message.buffer, tokens))
        yield FeaturesReady(message.buffer)
