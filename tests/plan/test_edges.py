"""Best edges: equal to brute force, and their predicted padding is what a simulation pads."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.schema import PlanConfig
from paceline.errors import PlanError
from paceline.plan.budget import BatchBudget
from paceline.plan.edges import all_distinct, best_edges, edge_ladder, interval_costs
from paceline.plan.entries import width_histogram
from paceline.plan.epoch import plan_epoch


def limits(budget=2000, samples=16, multiple=10, attention=None):
    return BatchBudget(budget, samples, None, multiple, attention)


def counted(lengths, limits):
    """Samples per padded width."""
    return width_histogram(lengths, limits.width_multiple)


def padded_by(lengths, limits, ends):
    """What buckets that end at these widths pad, from the costs of all intervals."""
    widths, counts = np.unique(limits.widths(lengths), return_counts=True)
    cuts = np.searchsorted(widths, ends) + 1
    padded, _ = interval_costs(widths, counts, cuts, limits)
    return sum(padded[place, place] for place in range(len(cuts)))


def skewed(count, seed=0, top=4000):
    return np.clip(np.random.default_rng(seed).lognormal(6.5, 0.8, count), 20, top).astype(np.int64)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 120), min_size=4, max_size=60), st.integers(1, 4), st.sampled_from([None, 300]))
def test_best_edges_equal_brute_force(lengths, num_buckets, attention):
    lengths, budgets = np.array(lengths), limits(600, 8, 10, attention)
    widths = np.unique(budgets.widths(lengths))
    if num_buckets > len(widths):
        with pytest.raises(PlanError, match=f"larger than the {len(widths)} distinct widths"):
            best_edges(counted(lengths, budgets), budgets, num_buckets)
        return
    found = best_edges(counted(lengths, budgets), budgets, num_buckets)
    costs = {
        cut: padded_by(lengths, budgets, np.array([*cut, widths[-1]]))
        for cut in combinations(widths[:-1].tolist(), num_buckets - 1)
    }
    assert len(found.edges) == num_buckets
    assert found.padded_tokens == pytest.approx(min(costs.values()), rel=1e-9)
    assert found.padded_tokens == pytest.approx(costs[tuple(found.edges[:-1].tolist())], rel=1e-9)


@pytest.mark.parametrize(
    ("budget", "samples", "attention"), [(16_384, 64, None), (16_384, 9, None), (24_000, 64, 4000)]
)
def test_predicted_padding_is_what_a_long_simulation_pads(budget, samples, attention):
    lengths = skewed(400_000)
    budgets = BatchBudget(budget, samples, None, 64, attention)
    found = best_edges(counted(lengths, budgets), budgets, 5)
    config = PlanConfig(
        strategy="bucketed", edges=found.edges.tolist(), token_budget=budget, max_samples=samples,
        attention_length=attention,
    )  # fmt: skip
    made = plan_epoch(lengths, None, config, num_anchors=1, block_size=2, seed=0, epoch=0)
    padded = (made.counts * made.widths.astype(np.int64)).sum()
    assert lengths.sum() / found.padded_tokens == pytest.approx(lengths.sum() / padded, abs=5e-4)
    counts = np.bincount(made.buckets, minlength=5)
    assert np.allclose(counts, found.batches, rtol=5e-3)


def test_fewest_buckets_for_windows_of_different_ones():
    lengths, budgets = skewed(20_000), limits(16_384, 64, 64)
    ladder = edge_ladder(counted(lengths, budgets), budgets, 64)
    found = all_distinct(ladder, 4)
    assert found is not None and found.largest_share <= 1 / 4
    assert all(made.largest_share > 1 / 4 for made in ladder[: len(found.edges) - 1])
    assert all_distinct(edge_ladder(counted(np.full(100, 50), budgets), budgets, 64), 2) is None


def test_more_buckets_never_pad_more():
    lengths, budgets = skewed(20_000), limits(16_384, 64, 64)
    ladder = edge_ladder(counted(lengths, budgets), budgets, 9)
    padded = [made.padded_tokens for made in ladder]
    assert padded == sorted(padded, reverse=True)
    assert [len(made.edges) for made in ladder] == list(range(1, 10))


def test_many_distinct_widths_are_searched_nearly_exactly():
    lengths, fine = skewed(60_000), limits(16_384, 64, 8)
    found = best_edges(counted(lengths, fine), fine, 4)
    moved = [
        padded_by(lengths, fine, found.edges + np.array([*shift, 0]))
        for shift in ((8, 0, 0), (-8, 0, 0), (0, 8, 0), (0, -8, 0), (0, 0, 8), (0, 0, -8))
    ]
    assert found.padded_tokens <= min(moved) * (1 + 1e-6)


def test_optimal_edges_are_the_plans_buckets():
    lengths = skewed(5_000)
    config = PlanConfig(strategy="bucketed", edges="optimal", num_buckets=4, token_budget=16_384)
    made = plan_epoch(lengths, None, config, num_anchors=1, block_size=2, seed=0, epoch=0)
    budgets = BatchBudget.of(config)
    assert made.edges.tolist() == best_edges(counted(lengths, budgets), budgets, 4).edges.tolist()
    for index in range(made.num_batches):
        batch = made.batch(index)
        low = 0 if batch.bucket == 0 else made.edges[batch.bucket - 1]
        assert low < lengths[batch.rows].min() <= lengths[batch.rows].max() <= made.edges[batch.bucket]


def test_bad_edges_are_refused():
    with pytest.raises(ValueError, match="edges do not increase: 20 follows 30"):
        PlanConfig(edges=[10, 30, 20])
    with pytest.raises(ValueError, match="edges is empty"):
        PlanConfig(edges=[])
    with pytest.raises(ValueError, match="edges starts with 0"):
        PlanConfig(edges=[0, 5])
    with pytest.raises(PlanError, match=r"plan\.edges end at 100 but the longest sample has 300 tokens"):
        plan_epoch([300, 20], None, PlanConfig(edges=[50, 100]), num_anchors=1, block_size=2, seed=0, epoch=0)
    with pytest.raises(PlanError, match="num_buckets 9 is larger than the 2 distinct widths"):
        plan_epoch(
            [64, 128], None, PlanConfig(edges="optimal", num_buckets=9), num_anchors=1, block_size=2, seed=0, epoch=0
        )
