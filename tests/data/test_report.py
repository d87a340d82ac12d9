"""Sums of reports against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.data.report import PrepareReport, Tally, anchor_coverage, length_histogram, length_percentiles
from paceline.data.use import passes_sentence
from paceline.evaluate.on_policy import on_policy, streaks_of


@pytest.mark.parametrize(("num_anchors", "block_size"), [(1, 2), (2, 3), (3, 4), (9, 4)])
def test_coverage_is_the_mean_over_all_draws(num_anchors: int, block_size: int) -> None:
    eligible = np.array([1, 4, 6, 6])
    reached = 0.0
    for total in eligible.tolist():
        draws = list(itertools.combinations(range(total), min(total, num_anchors)))
        for draw in draws:
            labels = {a + k for a in draw for k in range(1, block_size) if a + k <= total}
            reached += len(labels) / len(draws)
    found = anchor_coverage(eligible, num_anchors=num_anchors, block_size=block_size)
    assert found.covered_labels == pytest.approx(reached / eligible.sum())
    assert found.anchors == sum(min(e, num_anchors) for e in eligible.tolist())
    assert found.eligible == 17 and found.capped_samples == sum(e > num_anchors for e in eligible.tolist())


def test_a_row_cap_leaves_most_labels_of_long_samples_out() -> None:
    short = anchor_coverage(np.array([186]), num_anchors=512, block_size=16)
    long = anchor_coverage(np.array([100_000]), num_anchors=512, block_size=16)
    assert short.covered_labels == 1.0 and short.anchors == 186
    assert 0.05 < long.covered_labels < 0.08 and long.anchors == 512


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
    first.add(Tally.from_json(second.to_json()))
    assert first.rows_in == 5 and first.lost_supervised_tokens == 4
    assert (first.set_aside["too_long"].count, first.set_aside["too_long"].example) == (2, "a:1")
    assert first.notes["cut"].example == "b:2"


def test_reports_survive_json(tmp_path: object) -> None:
    report = PrepareReport("s", "f", 1, 1, 1, {}, {}, 5, 3, 2, 0, [[8, 1, 5]], {"50": 5}, {}, ["few"])
    assert PrepareReport.from_json(report.to_json()) == report


def test_streaks_are_those_counted_one_by_one() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        mask = rng.random(20) < 0.8
        labels = np.flatnonzero(mask[1:]) + 1
        if not len(labels):
            continue
        chosen = rng.random(len(labels)) < 0.7
        good = dict(zip(labels.tolist(), chosen.tolist(), strict=True))
        wanted = []
        for anchor in range(19):
            if mask[anchor] and mask[anchor + 1]:
                streak = 0
                while streak < 4 and good.get(anchor + streak + 1, False):
                    streak += 1
                wanted.append(streak)
        assert streaks_of(labels, chosen, mask, 5).tolist() == wanted


class OneRow:
    """A sample source of one row."""

    fingerprint = "one"
    lengths = np.array([9])
    eligible = np.array([4])
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 1, 1], dtype=bool)

    def read(self, rows: object) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(np.arange(9), self.mask)]


def test_every_supervised_token_is_scored_and_no_other() -> None:
    asked: list[list[int]] = []

    def score(ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        asked.append(labels.tolist())
        return labels != 7, np.full(len(labels), 0.5)

    found = on_policy(OneRow(), [0], score, block_size=3, progress=lambda _: None)
    assert asked == [[2, 3, 4, 6, 7, 8]]
    assert (found.rows, found.tokens, found.mean_nll) == (1, 6, 0.5) and found.greedy_share == pytest.approx(5 / 6)
    # Anchors 2, 3, 6, 7: two, one (the next is not supervised), none (7 is not the target's choice), one.
    assert found.tau_ceiling == 1 + (2 + 1 + 0 + 1) / 4


def test_rows_and_epochs_stand_beside_published_recipes() -> None:
    assert passes_sentence(1_600_000, 8).startswith("1,600,000 rows × 8 epochs = 12,800,000 rows trained; published")
    assert "48,000 rows trained, 1.0% of the smallest recipe; published" in passes_sentence(8000, 6)
