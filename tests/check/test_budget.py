"""Bytes by cause against the real tensors; the split of devices against all splits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.check import memory_budget
from paceline.config import Settings, load_settings
from paceline.drafter.learner import Learner
from paceline.drafter.memory import num_parameters
from paceline.drafter.network import Drafter
from paceline.drafter.spec import DrafterSpec, derive_spec
from paceline.pipeline.feature_pool import FeaturePool
from paceline.target_model.facts import describe


@pytest.fixture
def settings(demo_assets: Path) -> Settings:
    return load_settings(
        None, {"run_dir": "unused", "target.path": str(demo_assets / "target"), "drafter.dtype": "float32"}
    )


def spec_of(settings: Settings, **changes: object) -> DrafterSpec:
    facts = describe(settings.target.path)
    drafter = settings.drafter.model_copy(update=changes)
    return derive_spec(drafter, facts, [1, 3, 5], 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 2},
        {"num_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
        {"num_layers": 1, "intermediate_size": 96},
    ],
)
def test_parameters_are_those_of_the_network(settings: Settings, changes: dict[str, int]) -> None:
    spec = spec_of(settings, **changes)
    assert num_parameters(spec) == sum(p.numel() for p in Drafter(spec).parameters())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weights_gradients_and_states_are_those_of_the_learner(settings: Settings, name: str) -> None:
    settings = settings.model_copy(update={"optimizer": settings.optimizer.model_copy(update={"name": name})})
    facts, spec = describe(settings.target.path), spec_of(settings, num_layers=2)
    table = torch.zeros(spec.vocab_size, spec.hidden_size)
    learner = Learner(
        spec,
        embedding=table,
        head=table,
        drafter=settings.drafter,
        objective=settings.objective,
        optimizer=settings.optimizer,
        total_steps=4,
        seed=0,
    )
    for parameter in learner.parameters:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad.clone() for parameter in learner.parameters]
    for optimizer in learner.optimizers.values():
        optimizer.step()
    needed = memory_budget.drafter_bytes(facts, spec, settings, memory_budget.Load(100, 128, 64))
    assert needed["master weights"] == sum(p.numel() * 4 for p in learner.network.parameters())
    assert needed["gradients"] == sum(g.numel() * 4 for g in gradients)
    assert needed["embedding and head"] == table.numel() * 4
    states = [
        tensor
        for state in learner.state_dict()["optimizer"].values()
        for entry in state["state"].values()
        for tensor in entry.values()
        if isinstance(tensor, torch.Tensor) and tensor.ndim
    ]
    held = sum(t.numel() * 4 for t in states)
    # Muon keeps one state a matrix, AdamW two a parameter; the few norms of Muon are AdamW's.
    assert needed["optimizer state"] == pytest.approx(held, rel=0.01)


def test_pool_is_that_of_the_pipeline(settings: Settings) -> None:
    facts, spec = describe(settings.target.path), spec_of(settings)
    columns, load = 3 * facts.hidden_size, memory_budget.Load(96, 128, 64)
    teacher = settings.objective.model_copy(update={"terms": {"ce": 0.5, "kl": 0.5}})
    for transport in ("exact", "bf16", "fp8"):
        for objective, last in ((settings.objective, 0), (teacher, facts.hidden_size)):
            flow = settings.flow.model_copy(update={"transport": transport})
            changed = settings.model_copy(update={"flow": flow, "objective": objective})
            pool = FeaturePool(flow.num_buffers, 96, columns, torch.bfloat16, last, transport=transport, taps=3)
            assert memory_budget.pool_bytes(facts, spec, changed, load) == pool.num_bytes
    one = FeaturePool(1, 96, columns, torch.bfloat16).num_bytes
    flow = settings.flow.model_copy(update={"pool_bytes": 3 * one + 5})
    assert memory_budget.pool_bytes(facts, spec, settings.model_copy(update={"flow": flow}), load) == 3 * one


def test_roles_that_share_a_device_are_added(settings: Settings) -> None:
    devices = {"target_devices": ["cuda:0", "cpu"], "drafter_devices": ["cpu"]}
    changes = {
        "flow": settings.flow.model_copy(update=devices),
        "evaluate": settings.evaluate.model_copy(update={"device": "cuda:0"}),
    }
    settings = settings.model_copy(update=changes)
    assert memory_budget.by_device(settings, {"a": 1, "b": 2}, {"c": 10}, {"d": 7}) == {"cuda:0": 10, "cpu": 13}


def test_inline_roles_compute_in_turn(settings: Settings) -> None:
    flow = {"mode": "inline", "target_devices": ["cuda:0"], "drafter_devices": ["cuda:0"]}
    settings = settings.model_copy(update={"flow": settings.flow.model_copy(update=flow)})
    target, drafter = {"weights": 100, "features": 5, "activations": 8}, {"masters": 40, "activations": 30}
    assert memory_budget.by_device(settings, target, drafter, {}) == {"cuda:0": 100 + 40 + 30}
    assert memory_budget.by_device(settings, target, {**drafter, "activations": 3}, {}) == {"cuda:0": 100 + 40 + 13}


def test_a_worker_on_several_devices_is_shared_out(settings: Settings) -> None:
    devices = {"target_devices": ["cuda:0+cuda:1"], "drafter_devices": ["cuda:1"]}
    settings = settings.model_copy(update={"flow": settings.flow.model_copy(update=devices)})
    assert memory_budget.by_device(settings, {"a": 8}, {"c": 10}, {}) == {"cuda:0": 4, "cuda:1": 14}
    assert memory_budget.overlapping(["cuda:0+cuda:1"], ["cuda:1"], 1)
    assert not memory_budget.overlapping(["cuda:0+cuda:1"], ["cuda:2"], 1)


def test_the_evaluator_holds_both_models_in_its_own_type(settings: Settings) -> None:
    spec = spec_of(settings)
    assert memory_budget.evaluator_bytes(1000, spec, settings) == {}
    evaluate = settings.evaluate.model_copy(update={"device": "cpu", "dtype": "float32"})
    held = memory_budget.evaluator_bytes(1000, spec, settings.model_copy(update={"evaluate": evaluate}))
    assert (settings.target.dtype, settings.decode_dtype) == ("bfloat16", "bfloat16")
    assert held == {
        "weights of the target": 2000,
        "weights of the drafter": 4 * sum(p.numel() for p in Drafter(spec).parameters()),
    }


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("target_s", [1.0, 5.0, 40.0])
def test_best_split_is_the_best_of_all(devices: int, target_s: float) -> None:
    best = memory_budget.best_split(devices, target_s, 7.0)
    times = {count: max(target_s / count, 7.0 / (devices - count)) for count in range(1, devices)}
    assert best.seconds == min(times.values())
    assert times[best.targets] == best.seconds
    assert best.targets + best.drafters == devices


def test_one_device_does_both_in_turn() -> None:
    assert memory_budget.best_split(1, 3.0, 4.0).seconds == 7.0


def test_targets_that_take_several_devices() -> None:
    best = memory_budget.best_split(8, 30.0, 10.0, per_target=2)
    assert (best.targets, best.drafters, best.seconds) == (3, 2, 10.0)
    assert memory_budget.best_split(2, 3.0, 4.0, per_target=2).seconds == 7.0


def test_who_gets_in_whose_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget.os, "cpu_count", lambda: 2)
    assert not memory_budget.overlapping(["cpu"], ["cpu"], 1)
    assert memory_budget.overlapping(["cpu"], ["cpu"], 2)
    assert memory_budget.overlapping(["cuda:0"], ["cuda:0"], 1)
    assert not memory_budget.overlapping(["cuda:0", "cuda:1"], ["cuda:2"], 8)
