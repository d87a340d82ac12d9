"""The worker of one target device: host batches in, features into a buffer of the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from paceline.config import TargetConfig
from paceline.device import device_errors
from paceline.errors import TargetError
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.messages import (
    FeaturesReady,
    FromTarget,
    MemoryProbe,
    Probed,
    ShareWeights,
    TargetTask,
    ToTarget,
    ValidationTask,
    WeightsShared,
)
from paceline.pipeline.process import Stage
from paceline.target_model.hand_over import HandOver, SentBatch
from paceline.target_model.model import TargetModel
from paceline.target_model.shared_weights import on_host, shared_weights
from paceline.target_model.tap_guard import check_features, guard_first_batch
from paceline.types import HostBatch

GUARD_EVERY = 64
"""Batches between two checks of what a worker hands over, beyond that it is finite."""


LOADED = (
    "out of memory on {} while the target is loaded and room for its features is made; spread it over several devices "
    "(target.device_map), take a smaller target.dtype, or quantize it (target.quantization)"
)
"""On which device memory did not suffice at the start."""


class TargetStage(Stage):
    """Runs the frozen target on one device, under the tap guard.

    All features are checked to be finite. The first batch is guarded by running pieces of it again, then every
    `GUARD_EVERY`-th is checked as it is.

    Args:
        settings: the target.
        taps: tapped layers.
        device: where it runs; several, joined by ``+``, for a target that is spread over them.
        pool: buffers that features are written into.
    """

    def __init__(self, settings: TargetConfig, taps: Sequence[int], device: str, pool: FeaturePool) -> None:
        from paceline.target_model.load import load_target

        self._pool, self._device = pool, device
        with device_errors(TargetError, lambda: LOADED.format(device)):
            self._target = load_target(settings, taps, device)
            self._hand_over = HandOver(pool, device)
        self._sent: deque[tuple[TargetTask | ValidationTask | MemoryProbe, SentBatch]] = deque()
        self._handled = 0

    def handle(self, message: ToTarget) -> Iterator[FromTarget]:
        """Compute the features of the batch's real tokens, [S, N·H], and queue their way into the task's buffer.

        Before the first batch: hand over what drafters take over from the target.
        """
        if isinstance(message, ShareWeights):
            yield WeightsShared(on_host(shared_weights(self._target, with_teacher=self._pool.last_columns > 0)))
            return
        with device_errors(TargetError, lambda: out_of_memory(self._target, self._device, message.host)):
            self._sent.append((message, self._compute(message)))
        yield from self.answers()

    def answers(self) -> Iterator[FeaturesReady | Probed]:
        """Answers of the tasks whose features have arrived, oldest first; never waits."""
        while self._sent and self._sent[0][1].arrived.reached():
            message, sent = self._sent.popleft()
            sent.check()
            if isinstance(message, MemoryProbe):
                yield Probed(self._pool.transport_error(sent.batch.features))
            else:
                yield FeaturesReady(sent.buffer)

    @property
    def unanswered(self) -> int:
        """Tasks that were begun and have no answer yet."""
        return len(self._sent)

    def _compute(self, message: TargetTask | ValidationTask | MemoryProbe) -> SentBatch:
        tokens = int(message.host.lengths.sum())
        out = self._hand_over.place(message.buffer, tokens)
        batch = self._target.features(
            message.host, out=out, with_last=self._pool.last_columns > 0, copies=self._hand_over.copies
        )
        if not isinstance(message, MemoryProbe):
            if self._handled == 0:
                guard_first_batch(self._target, batch, spare=self._hand_over.spare)
            elif self._handled % GUARD_EVERY == 0:
                check_features(batch, self._target.taps, self._target.facts.hidden_size)
            self._handled += 1
        return self._hand_over.send(message.buffer, batch)


def out_of_memory(target: TargetModel, device: str, host: HostBatch) -> str:
    """The bytes of a batch that the target's device has no room for, and what to set."""
    rows, width = host.ids.shape
    size, hidden = target.dtype.itemsize, target.facts.hidden_size
    parts = {
        "weights": sum(tensor.nbytes for tensor in target.model.parameters()),
        "states of a layer": rows * width * hidden * size,
        "features": int(host.lengths.sum()) * target.width * size,
    }
    shown = ", ".join(f"{name} {value / 2**20:,.0f} MiB" for name, value in parts.items())
    return (
        f"out of memory on {device} with {rows} rows of {width} tokens ({rows * width} padded tokens, "
        f"{host.planned.draft_positions} draft positions): {shown}, and what a layer computes in between; lower "
        "plan.token_budget, or spread the target over several devices (target.device_map)"
    )
