"""A plan that changes on the way: every sample of every epoch once, whatever changes when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint.changes import FREE, STEERED, PlanBefore, SettingsChange, kind_of, plans_before
from paceline.config import PlanConfig, Settings, known_names
from paceline.run.training_plan import TrainingPlan

LENGTHS = np.random.default_rng(1).integers(6, 300, 90)
SPEC: Any = SimpleNamespace(block_size=8)
FACTS: Any = SimpleNamespace(pad_token_id=0)
PLANS = [
    {"strategy": "grid", "schedule": "stratified", "accumulate": 2, "token_budget": 900},
    {"strategy": "shuffled", "schedule": "shuffled", "accumulate": 1, "token_budget": 700},
    {"strategy": "bucketed", "schedule": "diverse", "accumulate": 3, "token_budget": 1200, "num_buckets": 4},
    {"strategy": "packed", "schedule": "shuffled", "accumulate": 2, "token_budget": 600},
    {"strategy": "grid", "schedule": "stratified", "accumulate": 4, "max_samples": 3, "draft_position_budget": 400},
]


class Source:
    """Samples of these lengths; every fifth has no anchor."""

    path = "store"

    def __init__(self, lengths: np.ndarray = LENGTHS) -> None:
        self.lengths = lengths
        self.eligible = np.where(np.arange(len(lengths)) % 5 == 4, 0, lengths // 2)

    def names(self) -> list[tuple[str, ...]]:
        """Tags of every row."""
        return [("often",) if row % 3 == 0 else ("once",) for row in range(len(self.lengths))]


def plan_of(plan: dict[str, Any], before: list[PlanBefore], *, epochs: int = 3, replicas: int = 1) -> TrainingPlan:
    values = {
        "run_dir": "r",
        "target": {"path": "t"},
        "plan": plan,
        "train": {"epochs": epochs},
        "drafter": {"num_anchors": 16, "block_size": 8},
    }
    source: Any = Source()
    return TrainingPlan(Settings.model_validate(values), SPEC, FACTS, source, replicas, before)


def rows_of(plan: TrainingPlan, step: int) -> list[int]:
    """All samples of a step."""
    planned = plan.steps[step - 1]
    found = [plan.epoch(planned.epoch).batch(index) for index in planned.batches]
    assert [batch.index for batch in found] == list(planned.batches)
    assert {batch.window for batch in found} == {planned.window}
    return [int(row) for batch in found for row in batch.rows]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_sample_of_every_epoch_once(data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, 2), "replicas")
    chosen = data.draw(st.lists(st.sampled_from(PLANS), min_size=2, max_size=4), "plans")
    before: list[PlanBefore] = []
    trained: list[list[int]] = []
    for plan in chosen[:-1]:
        now = plan_of(plan, before, replicas=replicas)
        if len(now.steps) <= len(trained) + 1:
            continue
        until = data.draw(st.integers(len(trained) + 1, len(now.steps) - 1), "change after step")
        trained += [rows_of(now, step) for step in range(len(trained) + 1, until + 1)]
        before = [*before, PlanBefore(until, PlanConfig.model_validate(plan), 16)]
    last = plan_of(chosen[-1], before, replicas=replicas)
    # What was trained is what the plan of the whole run says now, so a resumed run finds its place.
    assert [rows_of(last, step) for step in range(1, len(trained) + 1)] == trained
    by_epoch: dict[int, list[int]] = {}
    for planned in last.steps:
        by_epoch.setdefault(planned.epoch, []).extend(rows_of(last, planned.step))
    usable = np.flatnonzero(Source().eligible).tolist()
    assert {epoch: sorted(rows) for epoch, rows in by_epoch.items()} == dict.fromkeys(range(3), usable)
    for planned in last.steps:
        batches = [last.epoch(planned.epoch).batch(index) for index in planned.batches]
        if planned.step > len(trained):
            budget = last.whole_epoch(0).settings.token_budget
            assert all(batch.padded_tokens <= budget for batch in batches)
            assert all(batch.real_tokens == LENGTHS[batch.rows].sum() for batch in batches)


def test_a_change_at_the_end_of_an_epoch_leaves_both_whole() -> None:
    first = plan_of(PLANS[0], [])
    ends = sum(planned.epoch == 0 for planned in first.steps)
    now = plan_of(PLANS[1], [PlanBefore(ends, PlanConfig.model_validate(PLANS[0]), 16)])
    assert [rows_of(now, step) for step in range(1, ends + 1)] == [rows_of(first, step) for step in range(1, ends + 1)]
    fresh = plan_of(PLANS[1], [])
    starts = sum(planned.epoch == 0 for planned in fresh.steps)
    assert rows_of(now, ends + 1) == rows_of(fresh, starts + 1)


def test_weights_count_for_what_is_left() -> None:
    weighted = {**PLANS[0], "weights": {"often": 2.0}}
    now = plan_of(weighted, [PlanBefore(3, PlanConfig.model_validate(PLANS[0]), 16)], epochs=1)
    trained = [row for step in (1, 2, 3) for row in rows_of(now, step)]
    rest = [row for planned in now.steps[3:] for row in rows_of(now, planned.step)]
    assert not set(trained) & set(rest)
    left = sorted(set(np.flatnonzero(Source().eligible).tolist()) - set(trained))
    assert sorted(rest) == sorted(row for row in left for _ in range(2 if row % 3 == 0 else 1))


def test_the_largest_batches_are_those_that_are_trained() -> None:
    now = plan_of(PLANS[2], [PlanBefore(4, PlanConfig.model_validate(PLANS[1]), 16)])
    batches = [now.epoch(planned.epoch).batch(index) for planned in now.steps for index in planned.batches]
    assert now.largest.real_tokens == max(batch.real_tokens for batch in batches)
    for size, (epoch, index) in (now.largest.padded_tokens, now.largest.positions):
        assert now.epoch(epoch).batch(index).index == index
        assert size in {getattr(now.epoch(epoch).batch(index), name) for name in ("padded_tokens", "draft_positions")}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(50, "a"), (90, "b")], [(50, "a"), (90, "b")]),
        ([(50, "a"), (50, "b")], [(50, "a")]),
        ([(50, "a"), (100, "b"), (80, "c")], [(50, "a"), (80, "b")]),
        ([(100, "a"), (80, "b"), (120, "c")], [(80, "a"), (120, "c")]),
    ],
)
def test_steps_trained_again_count_once(steps: list[tuple[int, str]], expected: list[tuple[int, str]]) -> None:
    budgets = {"a": 100, "b": 200, "c": 300}
    changes = [
        SettingsChange(step, {"plan.token_budget": (0, 1)}, PlanConfig(token_budget=budgets[name]).model_dump(), 16)
        for step, name in steps
    ]
    found = [(before.last_step, before.plan.token_budget) for before in plans_before(changes)]
    assert found == [(step, budgets[name]) for step, name in expected]


def test_every_setting_is_of_one_kind() -> None:
    kinds = {name: kind_of(name) for name in known_names()}
    for place in (*FREE, *STEERED):
        # The options of vLLM are keys of one setting.
        name = "target.vllm" if place.startswith("target.vllm.") else place
        assert any(known == name or known.startswith(f"{name}.") for known in kinds), place
    assert not {name for name in FREE if kind_of(name) != "free"} | {n for n in STEERED if kind_of(n) != "steered"}
    fixed = {name for name, kind in kinds.items() if kind == "fixed"}
    assert {"seed", "optimizer.name", "optimizer.state", "drafter.block_size", "target.taps", "drafter.init"} <= fixed
    assert kinds["plan.accumulate"] == kinds["objective.gamma"] == kinds["drafter.noise.ratio"] == "steered"
