"""The worker of a target that vLLM runs: the same messages as `TargetStage`, so that nobody else knows which engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.config import TargetConfig
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.messages import (
    FeaturesReady,
    FromTarget,
    MemoryProbe,
    Probed,
    ShareWeights,
    ToTarget,
    WeightsShared,
)
from paceline.pipeline.process import Stage
from paceline.target_model.engine_proof import prove_engine
from paceline.target_model.hand_over import refuse_not_finite
from paceline.target_model.load import load_target
from paceline.target_model.model import TargetModel
from paceline.target_model.shared_weights import load_shared_weights, on_host, shared_weights
from paceline.target_model.stage import GUARD_EVERY
from paceline.target_model.tap_guard import check_features
from paceline.target_model.vllm_target import VllmTarget
from paceline.types import SharedWeights


class VllmStage(Stage):
    """Has vLLM run the frozen target.

    The first batch is compared with transformers, which loads the target on the CPU for it and gives that memory back;
    every `GUARD_EVERY`-th after it is checked as it is.

    Args:
        settings: the target.
        taps: tapped layers.
        device: where the engine runs; several, joined by ``+``.
        pool: buffers that features are written into.
        longest: tokens of the longest document.
        log: file for what vLLM says.
    """

    def __init__(
        self, settings: TargetConfig, taps: Sequence[int], device: str, pool: FeaturePool, longest: int, log: Path
    ) -> None:
        self._settings, self._pool, self._with_last = settings, pool, pool.last_columns > 0
        self._target = VllmTarget(settings, taps, device, with_last=self._with_last, longest=longest, log=log)
        self._reference: TargetModel | None = load_target(settings, taps) if settings.prove_engine else None
        self._handled = 0

    def handle(self, message: ToTarget) -> Iterator[FromTarget]:
        """Features of the batch's real tokens, [S, N·H], in the task's buffer."""
        if isinstance(message, ShareWeights):
            yield WeightsShared(on_host(self._weights()))
            return
        tokens = int(message.host.lengths.sum())
        batch = self._target.features(message.host, self._pool.place(message.buffer, tokens))
        refuse_not_finite(batch)
        if self._reference is not None:
            prove_engine(self._reference, batch, f"vllm {self._target.version}")
            self._reference = None
        if not isinstance(message, MemoryProbe):
            if self._handled % GUARD_EVERY == 0:
                check_features(batch, self._target.taps, self._target.facts.hidden_size)
            self._handled += 1
        self._pool.write(message.buffer, batch.features, batch.last_hidden)
        if isinstance(message, MemoryProbe):
            yield Probed(self._pool.transport_error(batch.features))
        else:
            yield FeaturesReady(message.buffer)

    def _weights(self) -> SharedWeights:
        if self._reference is not None:
            return shared_weights(self._reference, with_teacher=self._with_last)
        return load_shared_weights(self._settings, self._settings.dtype, with_teacher=self._with_last)
