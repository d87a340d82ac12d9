"""The shape grid: which widths share a class."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.schema import PlanConfig
from paceline.plan.budget import BatchBudget
from paceline.plan.epoch import plan_epoch
from paceline.plan.metrics import repairing
from paceline.plan.strategies import grid
from paceline.plan.strategies.grid import grid_classes


def test_widths_share_a_class_where_too_many_would_meet_again():
    limits = BatchBudget(1000, 64, None, 10, None)

    def tops(counts, class_batches, limits=limits):
        bounds = np.concatenate([[0], np.cumsum(counts)])
        return grid_classes(bounds, np.arange(1, len(counts) + 1) * 10, limits, class_batches).widths.tolist()

    assert tops([640, 500, 330], 4) == [10, 20, 30]
    wide = BatchBudget(10_000, 64, None, 10, None)
    apart = [20 if width in (500, 570, 630, 690) else 0 for width in range(10, 700, 10)]
    assert tops(apart, 3, wide) == [690]
    assert tops(apart, 2, wide) == [570, 690]
    assert tops(apart, 1, wide) == [500, 570, 630, 690]
    few = [20 if width in (500, 570) else 0 for width in range(10, 580, 10)]
    assert tops([6400, *few[1:]], 4, wide) == [10, 500, 570], "few of all meet again anyway"
    near = [20 if width in (500, 510) else 0 for width in range(10, 520, 10)]
    assert tops([6400, *near[1:]], 4, wide) == [10, 510], "next to no padding for other batch-mates"
    far = [64] + [0] * 98 + [1]
    assert tops(far, 4) == [10, 1000], "one long sample makes no class of short ones expensive"


def divisions(costs, met):
    """Cost and meetings of every division into classes."""
    for cuts in itertools.product((False, True), repeat=len(costs) - 1):
        ends = [part for part, cut in enumerate((*cuts, True)) if cut]
        joined = np.diff([-1, *ends]) - 1
        yield costs[ends, joined].sum(), met[ends, joined].sum()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=2, max_size=9), st.integers(1, 6), st.integers(1, 8))
def test_classes_pad_least_of_all_that_keep_the_share(counts, class_batches, first):
    limits = BatchBudget(4_000, 64, None, 10, None)
    bounds = np.concatenate([np.zeros(first, int), np.cumsum([0, *counts])])
    widths = np.arange(1, len(bounds)) * 10
    made = grid_classes(bounds, widths, limits, class_batches)
    sizes, own, batches, _ = grid.width_parts(bounds, widths, limits)
    costs, met, mates = grid.joint_costs(sizes, own, batches, limits, 64 * class_batches)
    ends = np.searchsorted(own, made.widths)
    chosen = (ends, np.diff(ends, prepend=-1) - 1)
    cost, meetings = costs[chosen].sum(), met[chosen].sum()
    tried = [(other, meets) for other, meets in divisions(costs, met) if np.isfinite(other)]
    kept = [meets * class_batches <= mates for _, meets in tried]
    assert (meetings * class_batches <= mates) == any(kept)
    assert min(other for other, meets in tried if meets <= meetings + 1e-9) == pytest.approx(cost)


def test_two_thousand_short_chats_are_nearly_as_full_as_sorted():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.3, 0.5, 2_000), 16, 4_000).astype(int)

    def plans(strategy):
        return [
            plan_epoch(lengths, None, PlanConfig(strategy=strategy), num_anchors=8, block_size=4, seed=0, epoch=epoch)
            for epoch in (0, 1)
        ]

    (made, other), (sorted_, _) = plans("grid"), plans("sorted")
    assert (made.counts * made.widths).sum() <= 1.02 * (sorted_.counts * sorted_.widths).sum()
    assert repairing(made, other) <= 0.2


@pytest.mark.parametrize(
    "lengths",
    [np.append(np.full(10_000, 60), 49_152), np.append(np.full(10_000, 500), np.full(60, 2_000))],
)
def test_grid_needs_no_more_batches_than_sorted(lengths):
    made = {
        strategy: plan_epoch(lengths, None, PlanConfig(strategy=strategy), num_anchors=8, block_size=4, seed=0, epoch=0)
        for strategy in ("grid", "sorted")
    }
    assert made["grid"].num_batches == made["sorted"].num_batches


@pytest.mark.parametrize("config", [PlanConfig(), PlanConfig(draft_position_budget=9_000, eligible_share=0.3)])
def test_lengths_that_travel_give_the_plan_of_those_looked_up(config, monkeypatch):
    lengths = np.clip(np.random.default_rng(1).lognormal(6, 0.8, 3_000), 20, 6_000).astype(int)
    shape = {"num_anchors": 64, "block_size": 16, "seed": 2, "epoch": 1}
    made = plan_epoch(lengths, None, config, **shape)
    monkeypatch.setattr(grid, "fits_word", lambda count, bits: False)
    assert plan_epoch(lengths, None, config, **shape).fingerprint == made.fingerprint


def test_grid_wastes_little_in_a_small_data_set():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.9, 1_100), 20, 6_000).astype(int)

    def pcosts(strategy):
        config = PlanConfig(strategy=strategy)
        made = plan_epoch(lengths, None, config, num_anchors=8, block_size=4, seed=0, epoch=0)
        return int((made.counts * made.widths.astype(np.int64)).sum())

    assert pcosts("grid") <= 1.2 * pcosts("sorted")
