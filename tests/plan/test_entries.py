"""What enters an epoch: weights exact over an epoch and over epochs, what is left out counted, bad numbers refused."""

import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.schema import PlanConfig
from paceline.errors import PlanError
from paceline.plan.entries import Groups, PlanInput, checked_counts, enter, groups_of_labels, groups_of_tags
from paceline.plan.epoch import plan_epoch

SHAPE = {"num_anchors": 8, "block_size": 4, "seed": 5}


def counted(lengths, weights, groups, epoch, **more):
    made = plan_epoch(lengths, None, PlanConfig(weights=weights, **more), groups=groups, epoch=epoch, **SHAPE)
    return Counter(np.concatenate([made.rows(index) for index in range(made.num_batches)]).tolist()), made


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.sampled_from([0.1, 0.3, 0.5, 1.0, 1.25, 2.0, 2.7]), st.integers(1, 12))
def test_rows_occur_as_often_as_their_weight_says(count, weight, epochs):
    lengths = np.arange(1, count + 6) * 10
    groups = Groups(np.array([1] * count + [0] * 5), ["plain", "chosen"])
    total = Counter()
    exact = Fraction(str(weight))
    for epoch in range(epochs):
        rows, made = counted(lengths, {"chosen": weight}, groups, epoch)
        chosen = [rows[row] for row in range(count)]
        assert sum(chosen) == int((epoch + 1) * exact * count) - int(epoch * exact * count)
        assert all(int(exact) <= times <= int(exact) + 1 for times in chosen)
        assert [rows[row] for row in range(count, count + 5)] == [1] * 5
        missing = sum(times == 0 for times in chosen)
        assert made.left_out == ({"weight": missing} if missing else {})
        total += rows
    times = [total[row] for row in range(count)]
    assert max(times) - min(times) <= 1
    assert sum(times) == int(epochs * exact * count)


def test_weight_zero_leaves_a_source_out():
    lengths = np.arange(1, 11) * 10
    groups = groups_of_labels(["a"] * 4 + ["b"] * 6)
    rows, made = counted(lengths, {"a": 0.0}, groups, 0)
    assert set(rows) == set(range(4, 10))
    assert made.left_out == {"weight": 4}
    with pytest.raises(PlanError, match="all 10 samples are left out"):
        counted(lengths, {"a": 0.0, "b": 0.0}, groups, 0)


def test_weights_go_with_dropped_samples_and_carried_ones():
    lengths = np.concatenate([np.full(40, 100), np.full(40, 900)])
    groups = groups_of_labels(["a"] * 80)
    rows, made = counted(lengths, {"a": 2.0}, groups, 0, max_length=500)
    assert rows == dict.fromkeys(range(40), 2)
    assert made.left_out == {"over_length": 40}
    kept, made = counted(lengths, {}, None, 0, max_length=500, on_over_length="keep")
    assert len(kept) == 80
    assert made.kept_over_length == 40


def test_a_row_has_the_weight_of_its_first_weighted_tag():
    groups = groups_of_tags([["en", "code", "x.jsonl"], ["en", "y.jsonl"], []], {"code": 2.0, "y.jsonl": 0.5})
    assert [groups.names[code] for code in groups.codes] == ["code", "y.jsonl", ""]


@pytest.mark.parametrize(
    ("weights", "groups", "words"),
    [
        ({"a": 2.0}, None, "names a, but the samples carry no tags or sources"),
        ({"c": 2.0}, Groups(np.array([0, 1]), ["a", "b"]), "c is not a tag or source of the samples; allowed: a, b"),
        ({"a": 2.0}, Groups(np.array([0]), ["a", "b"]), "groups has 1 entries for 2 lengths"),
    ],
)
def test_bad_weights_are_refused(weights, groups, words):
    with pytest.raises(PlanError, match=re.escape(words)):
        counted(np.array([5, 6]), weights, groups, 0)


def test_negative_weights_are_refused_by_the_settings():
    with pytest.raises(ValueError, match=r"weights: a has -1\.0"):
        PlanConfig(weights={"a": -1.0})


def test_entries_are_the_rows_where_nothing_is_left_out():
    given = PlanInput(
        np.array([3, 4]), None, PlanConfig(draft_position_budget=None), num_anchors=1, block_size=2, replicas=1, seed=0
    )
    entries = enter(given, 0)
    assert entries.rows is None
    assert entries.drafts(np.arange(2)) is None
    assert entries.histogram.tolist() == [2]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "x: empty"),
        ([5, 0, 3], "x[1] is 0; allowed: 1 to 2147483647"),
        ([5, -2], "x[1] is -2"),
        ([5, 2**31], "x[1] is 2147483648"),
        ([5.0, float("nan")], "x: float64 numbers of shape (2,); give one whole number a sample"),
        ([5.0, 2.5], "x: float64"),
        (["a"], "x: <U1"),
        ([[1, 2]], "x: int64 numbers of shape (1, 2)"),
        ([True, False], "x: bool"),
    ],
)
def test_what_is_not_one_count_a_sample_is_refused_in_one_line(values, words):
    with pytest.raises(PlanError, match=re.escape(words)) as caught:
        checked_counts(values, "x", 1)
    assert len(caught.value.errors) == 1 and "\n" not in str(caught.value)


def test_counts_are_not_copied_and_whole_floats_are_read():
    values = np.array([3, 1], np.uint16)
    assert checked_counts(values, "x", 1) is values
    assert checked_counts(np.array([3.0, 1.0]), "x", 1).tolist() == [3, 1]
