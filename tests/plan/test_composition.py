"""Cutting sequences into batches, packing: the fast paths against slow readable ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.schema import PlanConfig
from paceline.plan.batches import cut_runs, cut_sequence
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import enter
from paceline.plan.epoch import plan_epoch
from paceline.plan.rng import Purpose, ascending, class_order, random_order, stream
from paceline.plan.strategies.grid import grid_classes
from paceline.plan.strategies.packed import match_gaps


def greedy(widths, limits, drafts=None):
    """Batches as lists of positions: a batch takes the next sample unless that breaks a budget."""
    batches = []
    for position in range(len(widths)):
        batch = [*batches[-1], position] if batches else [position]
        fits = (
            bool(batches)
            and len(batch) <= limits.max_samples
            and len(batch) * limits.cost(max(widths[p] for p in batch)) <= limits.token_budget
            and (drafts is None or sum(drafts[p] for p in batch) <= limits.draft_limit)
        )
        if fits:
            batches[-1] = batch
        else:
            batches.append([position])
    return batches


def offsets_of(batches):
    return [0, *np.cumsum([len(batch) for batch in batches]).tolist()]


limits_strategy = st.builds(
    BatchBudget,
    token_budget=st.integers(200, 900),
    max_samples=st.integers(1, 12),
    draft_position_budget=st.one_of(st.none(), st.integers(40, 120)),
    width_multiple=st.sampled_from([1, 8, 16]),
    attention_length=st.one_of(st.none(), st.integers(150, 400)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=120), limits_strategy, st.randoms(use_true_random=False))
def test_sequences_are_cut_as_the_slow_greedy_cuts_them(lengths, limits, random):
    widths = limits.widths(np.array(lengths))
    drafts = np.array([random.randint(0, 40) for _ in lengths]) if limits.draft_position_budget else None
    listed = drafts.tolist() if drafts is not None else None
    assert cut_sequence(widths, limits, drafts).tolist() == offsets_of(greedy(widths.tolist(), limits, listed))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=120), limits_strategy, st.randoms(use_true_random=False))
def test_runs_are_cut_as_the_slow_greedy_cuts_them(lengths, limits, random):
    widths = np.sort(limits.widths(np.array(lengths)))
    kinds = np.arange(1, widths[-1] // limits.width_multiple + 1) * limits.width_multiple
    bounds = np.concatenate([[0], np.searchsorted(widths, kinds, side="right")])
    drafts = np.array([random.randint(0, 40) for _ in lengths]) if limits.draft_position_budget else None
    listed = drafts.tolist() if drafts is not None else None
    assert cut_runs(bounds, kinds, limits, drafts).tolist() == offsets_of(greedy(widths.tolist(), limits, listed))


def slow_match(gaps, sizes):
    """The widest gap takes the longest item that fits, one after another."""
    left = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    top = max(sizes)
    pairs = []
    for gap in sorted(range(len(gaps)), key=lambda place: (-min(gaps[place], top), place)):
        for item in left:
            if sizes[item] <= gaps[gap]:
                pairs.append((item, gap))
                left.remove(item)
                break
    return pairs


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.lists(st.integers(1, 25), min_size=1, max_size=40),
)
def test_gaps_are_matched_as_one_by_one(gaps, sizes):
    items, who = match_gaps(np.array(gaps), np.array(sizes))
    assert list(zip(items.tolist(), who.tolist(), strict=True)) == slow_match(gaps, sizes)


@pytest.mark.parametrize("count", [0, 1, 2, 1000, 70_000])
def test_random_order_is_a_permutation_and_keyed(count):
    first = random_order(stream(1, 2, Purpose.COMPOSE), count)
    assert np.array_equal(np.sort(first), np.arange(count))
    assert np.array_equal(first, random_order(stream(1, 2, Purpose.COMPOSE), count))
    if count >= 1000:
        for other in (stream(2, 2, Purpose.COMPOSE), stream(1, 3, Purpose.COMPOSE), stream(1, 2, Purpose.SCHEDULE)):
            assert not np.array_equal(first, random_order(other, count))


def test_random_order_favours_no_place():
    bits = stream(5, 0, Purpose.COMPOSE)
    seen = np.zeros((6, 6), int)
    for _ in range(3000):
        seen[np.arange(6), random_order(bits, 6)] += 1
    # chi-square with 25 degrees of freedom: 52.6 is its 99.9 % point.
    assert ((seen - 500) ** 2 / 500).sum() < 52.6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=200), st.booleans())
def test_classes_are_sorted_with_right_bounds(classes, random):
    classes = np.array(classes, np.uint8)
    order, bounds = class_order(classes, 10, stream(0, 0, Purpose.COMPOSE) if random else None)
    assert np.array_equal(np.sort(order), np.arange(len(classes)))
    for number in range(10):
        assert (classes[order[bounds[number] : bounds[number + 1]]] == number).all()
    if not random:
        assert np.array_equal(order, np.argsort(classes, kind="stable"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**62), max_size=50))
def test_ascending_is_a_stable_argsort(values):
    values = np.array(values, np.int64)
    assert np.array_equal(ascending(values), np.argsort(values, kind="stable"))


def test_random_order_is_written_down():
    """A plan's identity must not change by accident: it is what resume relies on."""
    assert random_order(stream(7, 3, Purpose.COMPOSE), 8).tolist() == [0, 3, 4, 5, 1, 7, 2, 6]


def test_attention_cost_shrinks_batches_of_long_samples_only():
    limits = BatchBudget(49_152, 64, None, 64, 8192)
    assert limits.cost(64) == 64 + 1
    assert limits.cost(8192) == 16_384
    assert limits.capacity(8192) == 3
    assert BatchBudget(49_152, 64, None, 64, None).capacity(8192) == 6


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
def test_grid_needs_no_more_batches_than_sorted_for_a_few_outliers(lengths):
    made = {
        strategy: plan_epoch(lengths, None, PlanConfig(strategy=strategy), num_anchors=8, block_size=4, seed=0, epoch=0)
        for strategy in ("grid", "sorted")
    }
    assert made["grid"].num_batches == made["sorted"].num_batches


def test_grid_wastes_little_in_a_small_data_set():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.9, 1_100), 20, 6_000).astype(int)

    def padded(strategy):
        config = PlanConfig(strategy=strategy)
        made = plan_epoch(lengths, None, config, num_anchors=8, block_size=4, seed=0, epoch=0)
        return int((made.counts * made.widths.astype(np.int64)).sum())

    assert padded("grid") <= 1.2 * padded("sorted")


def test_entries_are_the_rows_where_nothing_is_left_out():
    entries = enter(np.array([3, 4]), None, PlanConfig(), num_anchors=1, block_size=2, seed=0, epoch=0)
    assert entries.rows is None
    assert entries.drafts is None
    assert entries.histogram.tolist() == [2]
