"""What the proof of an engine sees: shifted tokens, exchanged taps, a neighboring layer, another row's states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from batches import host_batch
from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.engine_proof import prove_engine
from paceline.target_model.load import load_target
from paceline.target_model.model import TargetModel
from paceline.types import FeatureBatch

ROWS = [list(range(3, 3 + length)) for length in (9, 5, 30, 12)]
HIDDEN = 32


@pytest.fixture(scope="module")
def target(qwen3: Path) -> TargetModel:
    """A tiny target in transformers."""
    return load_target(TargetConfig(path=str(qwen3), dtype="float32"), [0, 2])


@pytest.fixture
def batch(target: TargetModel) -> FeatureBatch:
    """What a right engine hands over, up to rounding."""
    batch = target.features(host_batch(ROWS), with_last=True)
    return replace(batch, features=batch.features * (1 + 1e-6))


def test_rounding_is_allowed(target: TargetModel, batch: FeatureBatch) -> None:
    errors = prove_engine(target, batch, "engine")
    assert len(errors) == 3 and max(errors) < 1e-5


def _exchanged(batch: FeatureBatch) -> FeatureBatch:
    return replace(batch, features=torch.cat([batch.features[:, HIDDEN:], batch.features[:, :HIDDEN]], dim=1))


def _shifted(batch: FeatureBatch) -> FeatureBatch:
    return replace(batch, features=batch.features.roll(1, dims=0))


def _one_token_doubled(batch: FeatureBatch) -> FeatureBatch:
    features = batch.features.clone()
    features[20] = features[19]
    return replace(batch, features=features)


def _normed(batch: FeatureBatch) -> FeatureBatch:
    assert batch.last_hidden is not None
    return replace(batch, last_hidden=torch.nn.functional.normalize(batch.last_hidden, dim=1))


@pytest.mark.parametrize("wrong", [_exchanged, _shifted, _one_token_doubled, _normed])
def test_other_states_are_refused(
    target: TargetModel, batch: FeatureBatch, wrong: Callable[[FeatureBatch], FeatureBatch]
) -> None:
    with pytest.raises(TargetError, match=r"engine: batch 0: layer \d: its states of sample \d differ"):
        prove_engine(target, wrong(batch), "engine")


def test_the_neighboring_layer_is_refused(target: TargetModel, batch: FeatureBatch) -> None:
    other = target.with_layout(masked=True, packed=False, taps=[1, 3]).features(host_batch(ROWS))
    with pytest.raises(TargetError, match="layer 0: its states"):
        prove_engine(target, replace(batch, features=other.features), "engine")
