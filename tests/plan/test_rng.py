"""Keyed randomness: permutations, classes and stable orders, the same everywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.rng import Purpose, ascending, class_order, random_order, sorted_words, stream


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


def test_notes_travel_with_their_items_and_change_no_order():
    random = np.random.default_rng(0)
    classes, notes = random.integers(0, 7, 70_000).astype(np.uint8), random.integers(0, 64, 70_000).astype(np.uint16)
    order, bounds = class_order(classes, 7, stream(3, 0, Purpose.COMPOSE))
    words, same = sorted_words(70_000, lambda part: (classes[part], notes[part]), 7, stream(3, 0, Purpose.COMPOSE), 6)
    assert np.array_equal(words >> 6, order) and np.array_equal(same, bounds)
    assert np.array_equal(words & 63, notes[order])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**62), max_size=50))
def test_ascending_is_a_stable_argsort(values):
    values = np.array(values, np.int64)
    assert np.array_equal(ascending(values), np.argsort(values, kind="stable"))


def test_random_order_is_written_down():
    """A plan's identity must not change by accident: it is what resume relies on."""
    assert random_order(stream(7, 3, Purpose.COMPOSE), 8).tolist() == [0, 3, 4, 5, 1, 7, 2, 6]
