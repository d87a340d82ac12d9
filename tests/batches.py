"""The one place where tests make planned batches and host batches by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.types import HostBatch, PlannedBatch


def planned_batch(rows: Sequence[int] | np.ndarray, width: int, real_tokens: int, **more: Any) -> PlannedBatch:
    """A micro-batch of these samples, all rows padded to `width`; further attributes by their names, 0 if not given."""
    place = dict.fromkeys(("index", "epoch", "window", "replica", "slot", "bucket", "draft_positions"), 0)
    rows = np.asarray(rows)
    padded = width * len(rows)
    return PlannedBatch(rows=rows, width=width, real_tokens=real_tokens, padded_tokens=padded, **{**place, **more})


def host_batch(
    documents: Sequence[Sequence[int] | np.ndarray],
    *,
    masks: Sequence[np.ndarray] | None = None,
    anchors: Sequence[np.ndarray] | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
    width: int | None = None,
    pad: int = 0,
    **more: Any,
) -> HostBatch:
    """Documents as a right-padded batch.

    Args:
        documents: token ids of each row.
        masks: supervised tokens of each row; every token that is not `pad` where None.
        anchors: anchor positions of each row; none where None.
        rows: samples; 0, 1, 2 ... where None.
        width: of the rows; that of the longest document where None.
        pad: the pad id.
        more: attributes of the planned batch.
    """
    lengths = np.array([len(document) for document in documents])
    shape = (len(documents), width or int(lengths.max()))
    ids, mask = np.full(shape, pad, dtype=np.int64), np.zeros(shape, dtype=bool)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = document
        mask[row, : len(document)] = ids[row, : len(document)] != pad if masks is None else masks[row]
    found = [np.zeros(0, dtype=np.int64)] * len(documents) if anchors is None else anchors
    rows = np.arange(len(documents)) if rows is None else rows
    planned = planned_batch(rows, shape[1], int(lengths.sum()), **more)
    counts = np.array([len(of_row) for of_row in found], dtype=np.int64)
    return HostBatch(planned, ids, mask, lengths, np.concatenate(found).astype(np.int64), counts)
