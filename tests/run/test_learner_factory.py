"""How many draft positions a rank computes at once where nobody says: what its card holds, the same at every start."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from paceline.cli import main
from paceline.drafter.learner import Learner
from paceline.drafter.memory import CARD_SHARE, TrainingShape, drafter_bytes
from paceline.run import learner_factory as factory_module
from paceline.run.learner_factory import LearnerFactory, learner_factory
from paceline.types import SharedWeights
from small_runs import built

GIB = 2**30


@pytest.fixture
def run(make_run) -> Any:
    settings = make_run(drafter={"dtype": "bfloat16"})
    assert main(["prepare", str(settings)]) == 0
    return built(settings)


def with_cards(run: Any, **flow: Any) -> Any:
    """The run on cards that are not there; for what is asked before anything touches them."""
    settings = run.settings.model_copy(update={"flow": run.settings.flow.model_copy(update=flow)})
    return dataclasses.replace(run, settings=settings)


def card_of(monkeypatch: pytest.MonkeyPatch, size: float, held: float = 0.0) -> None:
    monkeypatch.setattr(factory_module, "total_bytes", lambda name: int(size))
    monkeypatch.setattr(factory_module, "allocated_bytes", lambda name: int(held))


def needed(factory: LearnerFactory, positions: int) -> int:
    parts = (factory.spec, factory.drafter, factory.objective, factory.optimizer)
    return sum(
        drafter_bytes(TrainingShape(*parts, features=factory.target.dtype), factory.most_tokens, positions).values()
    )


def test_a_card_is_filled_up_to_its_share_and_no_further(run, monkeypatch) -> None:
    factory = learner_factory(with_cards(run, mode="pipeline", drafter_devices=["cuda:3"]))
    assert factory.most_tokens == run.plan.largest.real_tokens > 0 and factory.beside == 0
    sample = run.settings.drafter.num_anchors * run.spec.block_size
    size = needed(factory, 5 * sample) / CARD_SHARE + GIB / 10**6
    card_of(monkeypatch, size)
    assert factory._in_passes(tied=False).positions_per_pass == 5 * sample
    card_of(monkeypatch, size, held=needed(factory, 5 * sample) - needed(factory, 3 * sample))
    assert factory._in_passes(tied=False).positions_per_pass == 3 * sample
    card_of(monkeypatch, 1)
    assert factory._in_passes(tied=False).positions_per_pass == sample


def test_what_shares_the_card_leaves_less_room(run, monkeypatch) -> None:
    flow = {"mode": "pipeline", "drafter_devices": ["cuda:1"], "share_devices": True}
    alone = learner_factory(with_cards(run, **flow, target_devices=["cuda:0"]))
    shared = learner_factory(with_cards(run, **flow, target_devices=["cuda:0+cuda:1"]))
    assert (alone.beside, shared.beside) == (0, 1)
    sample = run.settings.drafter.num_anchors * run.spec.block_size
    card_of(monkeypatch, 2 * (needed(shared, 2 * sample) / CARD_SHARE + 100))
    assert shared._in_passes(tied=False).positions_per_pass == 2 * sample
    assert alone._in_passes(tied=False).positions_per_pass > 2 * sample
    inline = learner_factory(with_cards(run, mode="inline", target_devices=["cuda:0"], drafter_devices=["cuda:0"]))
    assert inline.beside == 0, "its target counts as what this process holds"


def test_a_setting_and_a_cpu_are_left_alone(run, monkeypatch) -> None:
    card_of(monkeypatch, 80 * GIB)
    assert learner_factory(run)._in_passes(tied=False).positions_per_pass is None
    drafter = run.settings.drafter.model_copy(update={"positions_per_pass": 77})
    factory = dataclasses.replace(learner_factory(run), device="cuda:0", drafter=drafter)
    assert factory._in_passes(tied=False).positions_per_pass == 77


def test_the_learner_gets_what_fits(run, monkeypatch) -> None:
    """The whole way, on a CPU that is taken for a card where memory is asked about."""
    card_of(monkeypatch, 80 * GIB)
    factory = dataclasses.replace(learner_factory(run), device="cuda:0")
    devices: list[str] = []

    def on_cpu(spec: Any, *, device: str, **given: Any) -> Learner:
        devices.append(device)
        return Learner(spec, **given)

    monkeypatch.setattr("paceline.drafter.learner.Learner", on_cpu)
    table = torch.zeros(run.spec.vocab_size, run.spec.hidden_size)
    learner = factory(SharedWeights(table, table, None, None))
    assert learner.settings.positions_per_pass == factory._in_passes(tied=True).positions_per_pass is not None
    assert devices == ["cuda:0"]
