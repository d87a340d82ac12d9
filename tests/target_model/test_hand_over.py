"""Features on their way from a card to the pool: beside what is computed next, checked there, never too early."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fake_cuda import fake_cuda
from paceline.config import TargetConfig
from paceline.device import own_device
from paceline.errors import TargetError
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.messages import FeaturesReady, TargetTask
from paceline.target_model.hand_over import HandOver, SentBatch, tasks_in_flight
from paceline.target_model.stage import TargetStage
from paceline.types import FeatureBatch
from tiny_targets import target_batch

TAPS, HIDDEN, TOKENS = [0, 2], 32, 40
HOSTS = [
    target_batch(
        [[5 + (seed * 7 + row * 5 + n) % 90 for n in range(size)] for row, size in enumerate(sizes)], index=seed
    )
    for seed, sizes in enumerate([(9, 4), (17, 2, 6), (3, 3), (12, 20)])
]


def make_stage(folder, device: str, *, transport: str = "exact", last: int = 0) -> tuple[TargetStage, FeaturePool]:
    pool = FeaturePool(4, TOKENS, len(TAPS) * HIDDEN, torch.float32, last, transport=transport, taps=len(TAPS))
    return TargetStage(TargetConfig(path=str(folder), dtype="float32"), TAPS, device, pool), pool


def handed_over(folder, **more) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """What the stage puts into the pool on a CPU."""
    stage, pool = make_stage(folder, "cpu", **more)
    for buffer, host in enumerate(HOSTS):
        assert list(stage.handle(TargetTask(host, buffer))) == [FeaturesReady(buffer)]
    return [pool.read(buffer, int(host.lengths.sum())) for buffer, host in enumerate(HOSTS)]


def answers(stage: TargetStage) -> list[int]:
    return [ready.buffer for ready in stage.answers()]


@pytest.mark.parametrize("transport", ["exact", "bf16", "fp8"])
@pytest.mark.parametrize("last", [0, HIDDEN])
def test_a_cards_features_arrive_as_those_of_a_cpu(qwen3, monkeypatch, transport, last) -> None:
    expected = handed_over(qwen3, transport=transport, last=last)
    with fake_cuda(monkeypatch) as cuda:
        own_device("cuda:3")
        stage, pool = make_stage(qwen3, "cuda:3", transport=transport, last=last)
        for buffer, host in enumerate(HOSTS):
            list(stage.handle(TargetTask(host, buffer)))
            cuda.synchronize(3)
            assert answers(stage) == [buffer]
        assert cuda.contexts == {3}
    for buffer, (features, states) in enumerate(expected):
        found, found_states = pool.read(buffer, len(features))
        assert torch.equal(found, features)
        assert states is None or torch.equal(found_states, states)


def test_a_batch_is_answered_only_once_its_copy_is_done(qwen3, monkeypatch) -> None:
    expected = handed_over(qwen3)
    with fake_cuda(monkeypatch) as cuda:
        own_device("cuda:1")
        stage, pool = make_stage(qwen3, "cuda:1")
        assert list(stage.handle(TargetTask(HOSTS[0], 0))) == [] == list(stage.handle(TargetTask(HOSTS[1], 1)))
        assert stage._hand_over.copies.waited_for == [cuda.current_stream(1)] * 2, "copies follow the computation"
        assert stage.unanswered == 2 and answers(stage) == []
        assert not torch.equal(pool.read(0, 13)[0], expected[0][0])
        cuda.synchronize(1)
        assert answers(stage) == [0, 1] and stage.unanswered == 0
        assert torch.equal(pool.read(0, 13)[0], expected[0][0])
        assert torch.equal(pool.read(1, 25)[0], expected[1][0])


def test_memory_is_not_used_again_before_its_copy(qwen3, monkeypatch) -> None:
    expected = handed_over(qwen3)
    with fake_cuda(monkeypatch) as cuda:
        own_device("cuda:3")
        stage, pool = make_stage(qwen3, "cuda:3")
        for buffer, host in enumerate(HOSTS):  # more than the coordinator sends at once
            list(stage.handle(TargetTask(host, buffer)))
        cuda.synchronize(3)
        list(stage.answers())
        for buffer, (features, _) in enumerate(expected):
            assert torch.equal(pool.read(buffer, len(features))[0], features)


@pytest.mark.parametrize("transport", ["exact", "bf16", "fp8"])
def test_the_host_makes_no_pass_over_features(qwen3, monkeypatch, transport) -> None:
    """Neither the target's worker nor the drafter's reader: copies alone touch the page-locked buffers."""
    with fake_cuda(monkeypatch) as cuda:
        own_device("cuda:3")
        stage, pool = make_stage(qwen3, "cuda:3", transport=transport, last=HIDDEN)
        cuda.only_copies, room = True, pool.room_on(torch.device("cuda:3"))
        stage._handled = 63  # the next but one is checked by the guard
        for buffer, host in enumerate(HOSTS):
            list(stage.handle(TargetTask(host, buffer)))
            cuda.synchronize(3)
            assert answers(stage) == [buffer]
            tokens = int(host.lengths.sum())
            assert pool.read(buffer, tokens, room)[0].shape == (tokens, len(TAPS) * HIDDEN)
        with pytest.raises(AssertionError, match="passes over page-locked memory"):
            pool.view(0, 13).sum(dtype=torch.float32)


def test_features_that_are_not_finite_are_named_when_they_arrive(qwen3, monkeypatch) -> None:
    with fake_cuda(monkeypatch) as cuda:
        own_device("cuda:3")
        stage, _ = make_stage(qwen3, "cuda:3")
        list(stage.handle(TargetTask(HOSTS[0], 0)))
        cuda.synchronize(3)
        assert answers(stage) == [0]
        stage._target.structure.layers[2].register_forward_hook(spoil)
        list(stage.handle(TargetTask(HOSTS[1], 1)))
        cuda.synchronize(3)
        with pytest.raises(TargetError, match=r"features of 3 tokens of samples \[100, 101, 102\] are not finite"):
            answers(stage)


def sent(features: torch.Tensor) -> SentBatch:
    pool = FeaturePool(1, TOKENS, 12, torch.float32)
    return HandOver(pool, "cpu").send(0, FeatureBatch(target_batch([range(1, 10), range(1, 14)]), features))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_single_value_that_is_not_finite_is_refused_by_sample(value) -> None:
    features = torch.ones(22, 12)
    sent(features).check()
    features[15, 3] = value
    with pytest.raises(TargetError, match=r"features of 1 tokens of samples \[101\] are not finite"):
        sent(features).check()


def test_opposite_infinities_do_not_cancel() -> None:
    features = torch.ones(22, 12)
    features[0, 0], features[21, 1] = float("inf"), -float("inf")
    with pytest.raises(TargetError, match=r"features of 2 tokens of samples \[100, 101\]"):
        sent(features).check()


def spoil(module, args, output):
    """The second token of every row is not a number from here on."""
    states = output[0] if isinstance(output, tuple) else output
    states[:, 1] = float("nan")
    return output


@pytest.mark.parametrize(("device", "tasks"), [("cpu", 1), ("cuda:3", 2), ("cuda:0+cuda:1+cuda:2", 3), ("cpu+cpu", 1)])
def test_tasks_in_flight_keep_every_card_at_work(device, tasks) -> None:
    assert tasks_in_flight(device) == tasks


def test_the_first_batch_is_guarded_on_the_card(qwen3, monkeypatch) -> None:
    with fake_cuda(monkeypatch) as cuda:
        own_device("cuda:3")
        stage, _ = make_stage(qwen3, "cuda:3")
        cuda.only_copies = True
        stage._target.structure.layers[1].register_forward_hook(
            lambda module, args, output: output + output.mean(0, keepdim=True)
        )
        with pytest.raises(TargetError, match="padding, neighbours or later tokens leak"):
            list(stage.handle(TargetTask(HOSTS[0], 0)))
    assert np.all(HOSTS[0].lengths > 1)
