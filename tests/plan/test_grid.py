"""The shape grid: which widths share a class."""

import numpy as np
import pytest

from paceline.config.schema import PlanConfig
from paceline.plan.budget import BatchBudget
from paceline.plan.epoch import plan_epoch
from paceline.plan.strategies import grid
from paceline.plan.strategies.grid import grid_classes


def test_grid_classes_are_merged_only_where_they_are_small():
    limits = BatchBudget(1000, 64, None, 10, None)

    def tops(counts, class_batches, limits=limits):
        bounds = np.concatenate([[0], np.cumsum(counts)])
        return grid_classes(bounds, np.arange(1, len(counts) + 1) * 10, limits, class_batches).widths.tolist()

    assert tops([640, 500, 330], 4) == [10, 20, 30]
    wide = BatchBudget(10_000, 64, None, 10, None)
    near = [0] * 50 + [20, 20, 20, 20]
    assert tops(near, 3, wide) == [540]
    assert tops(near, 1, wide) == [510, 520, 530, 540]
    far = [6400] + [0] * 98 + [1]
    assert tops(far, 4) == [10, 1000], "one long sample makes no class of short ones expensive"


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

    def padded(strategy):
        config = PlanConfig(strategy=strategy)
        made = plan_epoch(lengths, None, config, num_anchors=8, block_size=4, seed=0, epoch=0)
        return int((made.counts * made.widths.astype(np.int64)).sum())

    assert padded("grid") <= 1.2 * padded("sorted")
