"""The worker of one target device: host batches in, features into a buffer of the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.messages import FeaturesReady, MemoryProbe, Probed, TargetTask, ValidationTask
from paceline.pipeline.process import Stage
from paceline.target_model.tap_guard import check_features, guard_first_batch
from paceline.types import FeatureBatch, HostBatch

GUARD_EVERY = 64
"""Batches between two checks of what a worker hands over, beyond that it is finite."""


class TargetStage(Stage):
    """Runs the frozen target on one device, under the tap guard.

    All features are checked to be finite. The first batch is guarded by running pieces of it again, then every
    `GUARD_EVERY`-th is checked as it stands.

    Args:
        settings: the target.
        taps: tapped layers.
        device: where it runs; several, joined by ``+``, for a target that is spread over them.
        pool: buffers that features are written into.
    """

    def __init__(self, settings: TargetConfig, taps: Sequence[int], device: str, pool: FeaturePool) -> None:
        from paceline.target_model.load import load_target

        self._target = load_target(settings, taps, device)
        self._pool, self._device = pool, device
        pool.pin(device)
        self._handled = 0

    def handle(self, message: TargetTask | ValidationTask | MemoryProbe) -> Iterator[FeaturesReady | Probed]:
        """Features of the batch's real tokens, [S, N·H], into the task's buffer."""
        batch = self._run(message.host, message.buffer)
        if isinstance(message, MemoryProbe):
            yield Probed(self._pool.error(message.buffer, batch.features))
            return
        if self._handled == 0:
            guard_first_batch(self._target, batch)
        elif self._handled % GUARD_EVERY == 0:
            check_features(batch, self._target.taps, self._target.facts.hidden_size)
        self._handled += 1
        yield FeaturesReady(message.buffer)

    def _run(self, host: HostBatch, buffer: int) -> FeatureBatch:
        tokens = int(host.lengths.sum())
        last = self._pool.last_view(buffer, tokens)
        try:
            batch = self._target.features(host, out=self._pool.place(buffer, tokens), with_last=last is not None)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise TargetError(self._out_of_memory(host)) from error
        require_finite(batch)
        self._pool.write(buffer, batch.features)
        if last is not None and batch.last_hidden is not None:
            last.copy_(batch.last_hidden)
        return batch

    def _out_of_memory(self, host: HostBatch) -> str:
        """The byte plan of a batch that did not fit, and what to lower."""
        rows, width = host.ids.shape
        size, hidden = self._target.dtype.itemsize, self._target.facts.hidden_size
        weights = sum(tensor.nbytes for tensor in self._target.model.parameters())
        parts = {
            "weights": weights,
            "states of a layer": rows * width * hidden * size,
            "features": int(host.lengths.sum()) * self._target.width * size,
        }
        shown = ", ".join(f"{name} {value / 2**20:,.0f} MiB" for name, value in parts.items())
        return (
            f"out of memory on {self._device} with {rows} rows of {width} tokens ({rows * width} padded): {shown}, and "
            "what a layer computes in between; lower plan.token_budget, or spread the target over several devices "
            "(target.device_map)"
        )


def require_finite(batch: FeatureBatch) -> None:
    """Refuse features with a NaN or an infinity; one pass over them.

    Raises:
        TargetError: names the samples.
    """
    if bool(torch.isfinite(batch.features.sum(dtype=torch.float32))):
        return
    bad = (~torch.isfinite(batch.features)).any(dim=1).cpu().numpy()
    of_document = np.repeat(np.arange(len(batch.host.lengths)), batch.host.lengths)
    samples = [int(row) for row in batch.host.planned.rows[np.unique(of_document[bad])]]
    if samples:
        raise TargetError(
            f"features of {int(bad.sum())} tokens of samples {samples[:8]}{' ...' if len(samples) > 8 else ''} are not "
            "finite; look at the target's weights, or use a wider target.dtype"
        )
