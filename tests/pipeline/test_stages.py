"""The real stages alone: what they refuse, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batches import host_batch
from drafter_cases import make_learner, small_spec
from fake_cuda import fake_cuda
from paceline.config import TargetConfig
from paceline.device import own_device
from paceline.drafter.stage import DrafterStage
from paceline.errors import DrafterError, StageError, TargetError
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.messages import (
    BufferReleased,
    BuildDrafter,
    DrafterBuilt,
    DrafterTask,
    FeaturesReady,
    MemoryProbe,
    Probed,
    ShareWeights,
    TakeStep,
    TargetTask,
    ValidationTask,
)
from paceline.target_model.stage import TargetStage
from paceline.types import HostBatch, PlannedStep, SharedWeights

TAPS, HIDDEN = [1, 3, 5], 128


def host(lengths: list[int], rows: list[int]) -> HostBatch:
    documents = [np.random.default_rng(row).integers(5, 90, length) for row, length in zip(rows, lengths, strict=True)]
    return host_batch(documents, rows=rows, index=3, draft_positions=96)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def begun(learner: Any, pool: FeaturePool, writer: Any = None) -> DrafterStage:
    """The stage of a learner; one that is called raises instead of being built."""
    stage = DrafterStage(learner if callable(learner) else lambda weights: learner, pool, writer)
    assert list(stage.handle(BuildDrafter(SharedWeights(torch.ones(2, 2), torch.ones(2, 2))))) == [DrafterBuilt()]
    return stage


@pytest.fixture
def stage(demo_assets: Path) -> TargetStage:
    settings = TargetConfig(path=str(demo_assets / "target"), dtype="float32")
    return TargetStage(settings, TAPS, "cpu", FeaturePool(2, 64, len(TAPS) * HIDDEN, torch.float32))


def test_a_probe_leaves_the_guarded_first_batch_as_it_would_be(stage: TargetStage) -> None:
    batch = host([20, 31], [4, 9])
    (probed,) = stage.handle(MemoryProbe(batch, 0))
    assert probed == Probed(0.0)
    state = torch.get_rng_state()
    (ready,) = stage.handle(TargetTask(batch, 1))
    assert ready == FeaturesReady(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(stage._pool.read(0, 51)[0], stage._pool.read(1, 51)[0])


def test_no_room_for_the_weights_in_shared_memory_is_one_line(
    stage: TargetStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.pipeline.feature_pool.shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(StageError, match=r"^shared memory: embedding and head, .* need \d MiB, .* has 0 MiB free"):
        list(stage.handle(ShareWeights()))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_names_bytes_and_what_to_lower(
    stage: TargetStage, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(stage._target, "features", raising(error))
    with pytest.raises(TargetError) as caught:
        list(stage.handle(MemoryProbe(host([20, 31], [4, 9]), 0)))
    text = str(caught.value)
    assert "out of memory on cpu with 2 rows of 31 tokens (62 padded tokens, 96 draft positions): weights " in text
    assert "MiB" in text and "lower plan.token_budget" in text and "\n" not in text


def test_a_drafter_that_runs_out_of_memory_says_what_to_lower() -> None:
    learner = make_learner(small_spec(), drafter={"positions_per_pass": 40})
    learner.accumulate = learner.step = raising(torch.OutOfMemoryError("CUDA out of memory"))
    drafter = begun(learner, FeaturePool(2, 64, 12, torch.float32), SimpleNamespace(check=lambda: None))
    says = (
        r"on cpu with 96 draft positions \(40 at once\) over 51 tokens \(62 padded tokens\): features .* MiB; "
        r"lower drafter.positions_per_pass \(now 40\)"
    )
    with pytest.raises(DrafterError, match=says):
        list(drafter.handle(DrafterTask(host([20, 31], [4, 9]), 0)))
    with pytest.raises(DrafterError, match=r"optimizer state .* MiB; .* set optimizer.state to 8bit"):
        list(drafter.handle(TakeStep(PlannedStep(1, 0, 0, range(0), save=False))))


def test_what_is_not_deterministic_is_one_line(stage: TargetStage, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.use_deterministic..."
    monkeypatch.setattr(stage._target, "features", raising(RuntimeError(text)))
    with pytest.raises(TargetError, match=r"^train.deterministic: cumsum_cuda_kernel .* to false$"):
        list(stage.handle(MemoryProbe(host([20, 31], [4, 9]), 0)))
    monkeypatch.setattr(stage._target, "features", raising(RuntimeError("CUDA error: something else")))
    with pytest.raises(RuntimeError, match="something else"):
        list(stage.handle(MemoryProbe(host([20, 31], [4, 9]), 0)))


@pytest.mark.parametrize("transport", ["exact", "fp8"])
def test_validation_features_are_kept_on_the_host(monkeypatch: pytest.MonkeyPatch, transport: Any) -> None:
    """The card makes them whole; the host copies them and makes no pass over them."""
    held: list[Any] = []
    features = torch.randn(51, 12)
    with fake_cuda(monkeypatch) as cuda:
        own_device("cuda:3")
        pool = FeaturePool(2, 64, 12, torch.float32, 6, transport=transport, taps=2)
        pool.write(0, features, features[:, :6].contiguous())
        expected = pool.read(0, 51)
        learner = SimpleNamespace(device=torch.device("cuda:3"), hold_for_validation=held.append)
        stage = begun(learner, pool)
        cuda.only_copies = True
        (released,) = stage.handle(ValidationTask(host([20, 31], [4, 9]), 0))
        assert released == BufferReleased(0)
        cuda.only_copies = False
        pool.storage.zero_(), pool.last.zero_()
        if transport == "exact":  # the fake card converts before the copy arrives
            assert torch.equal(held[0].features, expected[0])
        assert held[0].features.shape == (51, 12) and torch.equal(held[0].last_hidden, expected[1])
        assert [cuda.on_host(kept) for kept in (held[0].features, held[0].last_hidden)] == [True, True]


def test_a_batch_goes_where_the_one_before_the_last_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two places on the card in turn; a copy into one waits until what was computed with it is done."""
    seen: list[torch.Tensor] = []
    batch = host([20, 31], [4, 9])
    with fake_cuda(monkeypatch) as cuda:
        own_device("cuda:3")
        pool = FeaturePool(2, 64, 12, torch.float32, 6)
        learner = SimpleNamespace(device=torch.device("cuda:3"), accumulate=lambda batch: seen.append(batch.features))
        stage = begun(learner, pool)
        for number in range(4):
            pool.write(number % 2, torch.full((51, 12), float(number)), torch.zeros(51, 6))
            cuda.synchronize(3)
            list(stage.handle(DrafterTask(batch, number % 2)))
            assert (seen[-1] == number).all()
            assert stage._copies.waited_for == [cuda.current_stream(3)] * max(0, number - 1)
        places = [features.data_ptr() for features in seen]
        assert places[0] == places[2] != places[1] == places[3]


def test_out_of_memory_at_the_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    full, pool = raising(torch.OutOfMemoryError("CUDA out of memory")), FeaturePool(2, 64, 12, torch.float32)
    with pytest.raises(DrafterError, match=r"^out of memory while the drafter is made; lower plan.token_budget"):
        begun(full, pool)
    monkeypatch.setattr("paceline.target_model.load.load_target", full)
    with pytest.raises(TargetError, match=r"^out of memory on cpu while the target is loaded .*target.quantization\)$"):
        TargetStage(TargetConfig(path="x"), TAPS, "cpu", pool)
