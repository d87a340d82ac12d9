"""Sums of reports against brute force."""

from __future__ import annotations

import msgspec
import numpy as np

from paceline.data.report import CAPS, Count, Tally, length_histogram, length_percentiles


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
    first, second = Tally(rows_in=2), Tally(rows_in=3)
    first.leave_out("too_long", Count(1, "a:1", "9 tokens", 7, {"code": 7}))
    second.leave_out("too_long", Count(2, "b:1", "", 5, {"chat": 2}))
    second.note("cut", Count(1, "b:2", "", 4, {"chat": 4}))
    second.measure(9000, np.array([0, 5]), 5)
    first.measure(100, np.array([0, 50]), 50)
    first.add(msgspec.json.decode(msgspec.json.encode(second), type=Tally))
    assert first.rows_in == 5
    assert first.set_aside["too_long"] == Count(3, "a:1", "9 tokens", 12, {"code": 7, "chat": 2})
    assert first.notes["cut"] == Count(1, "b:2", "", 4, {"chat": 4})
    assert [(cap.max_length, cap.samples) for cap in first.caps] == [
        *((n, 1) for n in CAPS[:2]),
        (8192, 1),
        (16384, 2),
        (9000, 2),
    ]


def test_caps_keep_what_each_policy_would_keep() -> None:
    rng = np.random.default_rng(0)
    tally = Tally()
    kept = {cap: [0, 0, 0, 0] for cap in CAPS}
    for _ in range(200):
        edges = np.sort(rng.choice(int(rng.integers(20, 20_000)), size=2 * int(rng.integers(1, 6)), replace=False))
        length = int(edges[-1] + rng.integers(0, 5))
        mask = np.zeros(length, dtype=bool)
        for start, end in edges.reshape(-1, 2):
            mask[start:end] = True
        tally.measure(length, edges, int(mask.sum()))
        for cap, sums in kept.items():
            fits = length <= cap
            turns = sum(end - start for start, end in edges.reshape(-1, 2).tolist() if end <= cap)
            sums[:] = np.add(sums, [fits, mask.sum() * fits, turns, mask[:cap].sum()]).tolist()
    assert {c.max_length: [c.samples, c.whole, c.turns, c.cut] for c in tally.caps[:-1]} == kept
    everything = tally.caps[-1]
    assert everything.samples == 200 and everything.whole == everything.turns == everything.cut
