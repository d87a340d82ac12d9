"""Features on their way from the target's device into a buffer of the pool, while the device computes the next batch.

On a CPU the taps are written straight into the buffer. On a GPU they are collected in memory of the card; whether they
are finite is found out there, one copy from there to the page-locked buffer is queued beside what is computed next, and
the host waits for nothing: it asks now and then whether the copy is done. Not run on a GPU yet.

Shape letters: S real tokens, N taps, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.config import tasks_in_flight
from paceline.device import Mark, compute_waits, main_device, on_stream, page_lock, side_stream, stream_waits
from paceline.errors import TargetError
from paceline.pipeline.feature_pool import FeaturePool
from paceline.types import FeatureBatch


@dataclass(frozen=True, slots=True)
class SentBatch:
    """Features that are on their way.

    Attributes:
        batch: the features, where they were made.
        buffer: where they go.
        arrived: when they are there.
        finite: whether all are finite; to be read once they have arrived.
    """

    batch: FeatureBatch
    buffer: int
    arrived: Mark
    finite: Tensor

    def check(self) -> None:
        """Waits until they are there.

        Raises:
            TargetError: some are not finite; names the samples.
        """
        self.arrived.wait()
        if not bool(self.finite):
            refuse_not_finite(self.batch)


class HandOver:
    """Moves features of one target worker into the pool.

    Args:
        pool: the buffers.
        device: of the worker; of several, features come out on the first.

    Attributes:
        copies: the queue of its copies; None on a CPU.
    """

    def __init__(self, pool: FeaturePool, device: str) -> None:
        self._pool, self._device = pool, device
        self.copies = side_stream(device)
        self._collected: list[Tensor] = []
        self._last_sent: list[Mark | None] = []
        self._next = 0
        if self.copies is not None:
            count = tasks_in_flight(device)
            self._last_sent = [None] * count
            size, where = pool.max_tokens * pool.columns, main_device(device)
            self._collected = [torch.empty(size, dtype=pool.dtype, device=where) for _ in range(count)]
            self._finite = torch.ones(count, dtype=torch.bool)
            page_lock(self._finite, device)
        pool.pin(device)

    def place(self, buffer: int, tokens: int) -> Tensor | None:
        """Where the taps of the next batch are to be written; None where new memory is as good."""
        if self.copies is None:
            return self._pool.place(buffer, tokens)
        if (sent := self._last_sent[self._next]) is not None:
            compute_waits(self._device, sent)
        return self._collected[self._next]

    @property
    def spare(self) -> Tensor | None:
        """Memory of the batch after that one, free as long as that one is the only one."""
        return self._collected[(self._next + 1) % len(self._collected)] if self._collected else None

    def send(self, buffer: int, batch: FeatureBatch) -> SentBatch:
        """Queue the way of features that were written into `place`."""
        if self.copies is None:
            self._pool.write(buffer, batch.features, batch.last_hidden)
            return SentBatch(batch, buffer, Mark(self._device), _all_finite(batch.features))
        slot, self._next = self._next, (self._next + 1) % len(self._collected)
        stream_waits(self.copies, Mark(self._device))
        with on_stream(self.copies):
            self._finite[slot].copy_(_all_finite(batch.features), non_blocking=True)
            self._pool.write(buffer, batch.features, batch.last_hidden)
        arrived = Mark(self._device, self.copies)
        self._last_sent[slot] = arrived
        return SentBatch(batch, buffer, arrived, self._finite[slot])


def refuse_not_finite(batch: FeatureBatch) -> None:
    """Refuse features with a NaN or an infinity.

    Raises:
        TargetError: names the samples; none where only their sum is too large for float32.
    """
    bad = (~torch.isfinite(batch.features)).any(dim=1).cpu().numpy()
    of_document = np.repeat(np.arange(len(batch.host.lengths)), batch.host.lengths)
    samples = [int(row) for row in batch.host.planned.rows[np.unique(of_document[bad])]]
    if samples:
        raise TargetError(
            f"features of {int(bad.sum())} tokens of samples {samples[:8]}{' ...' if len(samples) > 8 else ''} are not "
            "finite; look at the target's weights, or use a wider target.dtype"
        )


def _all_finite(features: Tensor) -> Tensor:
    """Whether all numbers are finite, on their device; one pass. A sum that is too large counts as not finite too."""
    return torch.isfinite(features.sum(dtype=torch.float32))
