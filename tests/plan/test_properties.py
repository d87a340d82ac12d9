"""Any lengths, any budgets, every strategy and schedule: each sample exactly once, budgets kept, windows whole."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.schema import PlanConfig, Schedule, Strategy
from paceline.plan.budget import BatchBudget
from paceline.plan.epoch import plan_epoch
from paceline.plan.schedules import SCHEDULES
from paceline.plan.strategies import STRATEGIES
from paceline.plan.strategies.grid import MOST_GROWTH, grid_classes

EXAMPLES = 25


@st.composite
def requests(draw):
    """Lengths, eligible anchors, settings without strategy and schedule, and the shape of a window."""
    longest = draw(st.sampled_from([1, 7, 40, 300]))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=150))
    multiple = draw(st.sampled_from([1, 8, 64]))
    attention = draw(st.one_of(st.none(), st.integers(200, 2000)))
    top = -(-max(lengths) // multiple) * multiple
    cost = top if attention is None else top - (-top * top // attention)
    num_anchors, block_size = draw(st.integers(1, 20)), draw(st.integers(2, 5))
    plan = {
        "token_budget": cost * draw(st.integers(1, 12)) + draw(st.integers(0, 50)),
        "max_samples": draw(st.integers(1, 20)),
        "draft_position_budget": draw(st.one_of(st.none(), st.integers(num_anchors * block_size, 400))),
        "width_multiple": multiple,
        "attention_length": attention,
        "accumulate": draw(st.integers(1, 4)),
        "num_buckets": draw(st.integers(1, 4)),
        "sort_window": draw(st.integers(1, 40)),
        "mixed_span": draw(st.integers(1, 3)),
        "grid_class_batches": draw(st.integers(1, 4)),
        "antithetic": draw(st.booleans()),
        "curriculum_share": draw(st.sampled_from([0.25, 0.5, 1.0])),
        "curriculum_stages": draw(st.integers(1, 5)),
    }
    eligible = draw(st.one_of(st.none(), st.just([draw(st.integers(1, length)) for length in lengths])))
    shape = {
        "num_anchors": num_anchors,
        "block_size": block_size,
        "replicas": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 2**40)),
        "epoch": draw(st.integers(0, 3)),
    }
    return np.array(lengths), eligible, plan, shape


def check_budgets(made, lengths, eligible, config, shape):
    for index in range(made.num_batches):
        batch = made.batch(index)
        held = lengths[batch.rows]
        counts = eligible[batch.rows] if eligible is not None else held
        assert 1 <= len(batch.rows) <= config.max_samples
        assert held.max() <= batch.width < held.max() + config.width_multiple
        assert batch.width % config.width_multiple == 0
        assert batch.real_tokens == held.sum()
        assert batch.draft_positions == shape["block_size"] * np.minimum(counts, shape["num_anchors"]).sum()
        if config.draft_position_budget is not None:
            assert batch.draft_positions <= config.draft_position_budget
        extra = config.attention_length
        if config.strategy == "packed":
            costs = held if extra is None else held + -(-held * held // extra)
            assert costs.sum() <= config.token_budget == batch.padded_tokens
        else:
            cost = batch.width if extra is None else batch.width + -(-batch.width * batch.width // extra)
            assert len(batch.rows) * cost <= config.token_budget
            assert batch.padded_tokens == len(batch.rows) * batch.width


@pytest.mark.parametrize("strategy", get_args(Strategy))
@settings(max_examples=EXAMPLES, deadline=None)
@given(request=requests())
def test_every_strategy_plans_each_sample_once_in_budget(strategy, request):
    lengths, eligible, plan, shape = request
    config = PlanConfig(strategy=strategy, **plan)
    made = plan_epoch(lengths, eligible, config, **shape)
    rows = np.concatenate([made.batch(index).rows for index in range(made.num_batches)])
    assert np.array_equal(np.sort(rows), np.arange(len(lengths)))
    check_budgets(made, lengths, None if eligible is None else np.array(eligible), config, shape)
    assert plan_epoch(lengths, eligible, config, **shape).fingerprint == made.fingerprint


@pytest.mark.parametrize("schedule", get_args(Schedule))
@settings(max_examples=EXAMPLES, deadline=None)
@given(request=requests(), strategy=st.sampled_from(get_args(Strategy)))
def test_every_schedule_orders_each_batch_once_in_whole_windows(schedule, strategy, request):
    lengths, eligible, plan, shape = request
    config = PlanConfig(strategy=strategy, schedule=schedule, **plan)
    made = plan_epoch(lengths, eligible, config, **shape)
    size = config.accumulate * shape["replicas"]
    assert np.array_equal(np.sort(made.sequence), np.arange(made.batches.num_batches))
    assert made.num_windows == -(-made.num_batches // size)
    sizes = [len(made.window(number)) for number in range(made.num_windows)]
    assert sum(sizes) == made.num_batches
    assert all(count == size for count in sizes[:-1])
    assert [place for number in range(made.num_windows) for place in made.window(number)] == list(
        range(made.num_batches)
    )
    again = plan_epoch(lengths, eligible, PlanConfig(strategy=strategy, **plan), **shape).rescheduled(schedule)
    assert again.fingerprint == made.fingerprint


@settings(max_examples=80, deadline=None)
@given(request=requests(), strategy=st.sampled_from(get_args(Strategy)))
def test_stratified_windows_hold_each_buckets_share(strategy, request):
    lengths, eligible, plan, shape = request
    made = plan_epoch(lengths, eligible, PlanConfig(strategy=strategy, **plan), **shape)
    whole = made.num_batches // made.window_size
    buckets = made.buckets[: whole * made.window_size].reshape(whole, made.window_size)
    for bucket in np.unique(buckets):
        counts = (buckets == bucket).sum(axis=1)
        share = (buckets == bucket).sum() / whole
        assert set(counts.tolist()) <= {int(np.floor(share)), int(np.ceil(share))}


@st.composite
def outliers(draw):
    """Many samples of a few lengths and a few of very different ones, anywhere under the budget."""
    usual = draw(st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 3000)), min_size=1, max_size=6))
    rare = draw(st.lists(st.integers(1, 49_152), max_size=12))
    return np.concatenate([*(np.full(count, length) for length, count in usual), np.array(rare, int)])


@settings(max_examples=60, deadline=None)
@given(lengths=outliers(), multiple=st.sampled_from([1, 64]), class_batches=st.integers(1, 8))
def test_grid_needs_hardly_more_batches_than_sorted(lengths, multiple, class_batches):
    made = {}
    for strategy in ("grid", "sorted"):
        config = PlanConfig(strategy=strategy, width_multiple=multiple, grid_class_batches=class_batches)
        made[strategy] = plan_epoch(lengths, None, config, num_anchors=8, block_size=4, seed=0, epoch=0)
    widths = np.unique(-(-lengths // multiple) * multiple)
    limits = BatchBudget.of(config)
    bounds = np.searchsorted(np.sort(-(-lengths // multiple) * multiple), np.append(widths, widths[-1] + 1))
    joint = int(grid_classes(bounds, widths, limits, class_batches).joint.sum())
    assert made["grid"].num_batches <= made["sorted"].num_batches + joint
    padded = {name: int((plan.counts * plan.widths.astype(np.int64)).sum()) for name, plan in made.items()}
    # A batch may reach from one class into the next, and is then padded to it: at most one for every width.
    assert padded["grid"] <= MOST_GROWTH * padded["sorted"] + config.token_budget * len(widths)


@settings(max_examples=40, deadline=None)
@given(request=requests(), start=st.integers(0, 200))
def test_resume_at_any_index_gives_the_rest_of_the_plan(request, start):
    lengths, eligible, plan, shape = request
    config = PlanConfig(**plan)
    whole = plan_epoch(lengths, eligible, config, **shape)
    resumed = plan_epoch(lengths, eligible, config, **shape)
    for index in range(min(start, whole.num_batches), whole.num_batches):
        ours, theirs = resumed.batch(index), whole.batch(index)
        assert np.array_equal(ours.rows, theirs.rows)
        assert (ours.window, ours.replica, ours.slot, ours.width) == (
            theirs.window,
            theirs.replica,
            theirs.slot,
            theirs.width,
        )


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_every_strategy_but_sorted_composes_anew_each_epoch(strategy):
    lengths = np.random.default_rng(0).integers(50, 4000, 3000)
    plans = [
        plan_epoch(lengths, None, PlanConfig(strategy=strategy), num_anchors=8, block_size=4, seed=seed, epoch=epoch)
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    mates = [{frozenset(made.rows(index).tolist()) for index in range(made.num_batches)} for made in plans]
    for other in mates[1:]:
        if strategy == "sorted":
            assert other == mates[0]
        else:
            assert len(other & mates[0]) < 0.02 * len(mates[0])


@pytest.mark.parametrize("limit", [{"max_samples": 9}, {"draft_position_budget": 300}, {"attention_length": 900}])
def test_large_packings_keep_every_budget_too(limit):
    lengths = np.random.default_rng(0).integers(20, 400, 12_000)
    config = PlanConfig(strategy="packed", token_budget=4096, width_multiple=1, **limit)
    shape = {"num_anchors": 20, "block_size": 2, "seed": 0, "epoch": 0}
    made = plan_epoch(lengths, None, config, **shape)
    check_budgets(made, lengths, None, config, shape)
    assert np.array_equal(np.sort(made.batches.order), np.arange(12_000))


def test_large_packings_leave_hardly_a_gap():
    lengths = np.random.default_rng(0).integers(20, 400, 40_000)
    config = PlanConfig(strategy="packed", token_budget=4096)
    made = plan_epoch(lengths, None, config, num_anchors=8, block_size=4, seed=0, epoch=0)
    assert lengths.sum() / (made.num_batches * 4096) > 0.998


def test_mixed_batches_cross_every_edge():
    lengths = np.random.default_rng(0).integers(1, 400, 4_000)
    config = PlanConfig(strategy="mixed", edges=[100, 200, 300, 400], token_budget=4096, mixed_span=2)
    made = plan_epoch(lengths, None, config, num_anchors=8, block_size=4, seed=0, epoch=0)
    met = {
        frozenset(np.searchsorted([100, 200, 300, 400], lengths[made.rows(index)]).tolist())
        for index in range(made.num_batches)
    }
    assert {frozenset({0, 1}), frozenset({1, 2}), frozenset({2, 3})} <= met
    assert all(max(kinds) - min(kinds) < 2 for kinds in met)


def test_registries_hold_what_the_settings_name():
    assert tuple(STRATEGIES) == get_args(Strategy)
    assert tuple(SCHEDULES) == get_args(Schedule)
