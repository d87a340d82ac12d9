"""How far answers are the target's own, against counting one by one."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.evaluate.on_policy import on_policy, streaks_of


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
