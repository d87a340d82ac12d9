"""Packing: the vectorized matching of gaps against one gap after another."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.strategies.packed import match_gaps


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
