"""Collation against a row-by-row reading; anchors are keyed by sample, not by batch."""

from __future__ import annotations

import numpy as np
import pytest

from batches import planned_batch
from paceline.data.collate import collate
from paceline.drafter.anchors import sample_anchors
from paceline.errors import DataError
from paceline.types import PlannedBatch

generator = np.random.default_rng(0)
ROWS = [(generator.integers(0, 99, n), generator.random(n) < 0.8) for n in (5, 17, 9, 30, 12)]


class Source:
    """Rows in memory."""

    fingerprint = "test"
    lengths = np.array([len(ids) for ids, _ in ROWS])
    eligible = np.array([int((mask[1:] & mask[:-1]).sum()) for _, mask in ROWS])

    def read(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        return [ROWS[int(row)] for row in rows]


def planned(rows: list[int], width: int, real: int | None = None, epoch: int = 0) -> PlannedBatch:
    total = int(Source.lengths[rows].sum()) if real is None else real
    return planned_batch(rows, width, total, epoch=epoch)


def made(batch: PlannedBatch) -> object:
    return collate(batch, Source(), sample_anchors, seed=3, num_anchors=4, pad_id=7)


def test_rows_are_right_padded_and_masks_end_with_the_row() -> None:
    host = made(planned([3, 0, 2], 32))
    for place, row in enumerate([3, 0, 2]):
        ids, mask = ROWS[row]
        assert host.lengths[place] == len(ids)
        assert np.array_equal(host.ids[place, : len(ids)], ids)
        assert (host.ids[place, len(ids) :] == 7).all()
        assert np.array_equal(host.loss_mask[place, : len(ids)], mask)
        assert not host.loss_mask[place, len(ids) :].any()


def test_anchors_are_the_samples_own_whatever_the_batch() -> None:
    together, alone = made(planned([3, 0, 2], 32)), made(planned([2], 64))
    ends = np.cumsum(together.anchor_counts)
    assert together.anchor_counts.sum() == len(together.anchors)
    assert np.array_equal(together.anchors[ends[1] : ends[2]], alone.anchors)
    for place, row in enumerate([3, 0, 2]):
        chosen = together.anchors[ends[place] - together.anchor_counts[place] : ends[place]]
        mask = ROWS[row][1]
        assert len(chosen) == min(4, Source.eligible[row])
        assert (np.diff(chosen) > 0).all()
        assert all(mask[a] and mask[a + 1] for a in chosen)


def test_anchors_change_with_the_epoch() -> None:
    assert not np.array_equal(made(planned([3], 32)).anchors, made(planned([3], 32, epoch=1)).anchors)


def test_a_store_that_changed_under_the_plan_is_refused() -> None:
    with pytest.raises(DataError, match=r"stage feed: batch 0, sample 3: has 30 tokens.*planned were 35"):
        made(planned([3], 32, real=35))
    with pytest.raises(DataError, match=r"sample 3: has 30 tokens.*rows of at most 16"):
        made(planned([3], 16))


def test_the_row_that_is_not_as_long_as_the_index_says_is_named() -> None:
    class Shorter(Source):
        def read(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
            return [(ids[:-1], mask[:-1]) if len(ids) == 9 else (ids, mask) for ids, mask in super().read(rows)]

    with pytest.raises(DataError, match="sample 2: has 8 tokens, and the batch 43"):
        collate(planned([3, 0, 2], 32), Shorter(), sample_anchors, seed=3, num_anchors=4, pad_id=7)


def test_a_row_with_another_mask_than_planned_is_named() -> None:
    class Damaged(Source):
        def read(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
            return [(ids, mask & (len(ids) != 9)) for ids, mask in super().read(rows)]

    with pytest.raises(DataError, match="stage feed: batch 0, sample 2: its loss mask gives 0 anchors, planned were 4"):
        collate(planned([3, 0, 2], 32), Damaged(), sample_anchors, seed=3, num_anchors=4, pad_id=7)
