"""Sums of reports against brute force."""

from __future__ import annotations

import msgspec
import numpy as np

from paceline.data.report import Tally, length_histogram, length_percentiles


def test_lengths_are_counted_in_powers_of_two() -> None:
    lengths = np.array([1, 2, 3, 4, 5, 8, 9, 64])
    each = np.ones(8, dtype=np.int64)
    assert length_histogram(lengths, each) == [
        [1, 1, 1],
        [2, 1, 2],
        [4, 2, 7],
        [8, 2, 13],
        [16, 1, 9],
        [32, 0, 0],
        [64, 1, 64],
    ]
    assert length_histogram(lengths[:0], each[:0]) == [] and length_percentiles(lengths[:0], each[:0]) == {}
    assert length_percentiles(lengths, each, (50, 100)) == {"50": 4, "100": 64}


def test_percentiles_of_counted_lengths_are_those_of_the_lengths() -> None:
    drawn = np.random.default_rng(0).integers(1, 90, size=1001)
    found = length_percentiles(*np.unique(drawn, return_counts=True), range(101))
    assert found == {str(p): int(np.percentile(drawn, p, method="lower")) for p in range(101)}


def test_tallies_add_in_order_and_survive_json() -> None:
    first, second = Tally(rows_in=2), Tally(rows_in=3, lost_supervised_tokens=4)
    first.leave_out("too_long", "a:1", "9 tokens")
    second.leave_out("too_long", "b:1")
    second.note("cut", "b:2")
    first.add(msgspec.json.decode(msgspec.json.encode(second), type=Tally))
    assert first.rows_in == 5 and first.lost_supervised_tokens == 4
    assert (first.set_aside["too_long"].count, first.set_aside["too_long"].example) == (2, "a:1")
    assert first.notes["cut"].example == "b:2"
