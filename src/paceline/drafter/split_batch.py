"""Splits a micro-batch by sample, where its draft positions exceed what is computed at once. numpy only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from paceline.types import HostBatch


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Some neighbouring samples of a batch.

    Attributes:
        host: the batch with these samples only.
        tokens: their rows among the batch's packed tokens.
    """

    host: HostBatch
    tokens: slice


def split_batch(host: HostBatch, block_size: int, limit: int | None) -> Iterator[BatchPart]:
    """Parts of whole samples with at most `limit` draft positions each (a larger sample is a part alone).

    Losses and gradients of the parts add up to those of the batch: every normaliser is of one sample or of the window.
    """
    positions = host.anchor_counts * block_size
    if limit is None or positions.sum() <= limit:
        yield BatchPart(host, slice(0, int(host.lengths.sum())))
        return
    token_edges = np.concatenate([[0], np.cumsum(host.lengths)])
    anchor_edges = np.concatenate([[0], np.cumsum(host.anchor_counts)])
    begin = 0
    while begin < len(positions):
        end, held = begin + 1, int(positions[begin])
        while end < len(positions) and held + positions[end] <= limit:
            held += int(positions[end])
            end += 1
        rows = slice(begin, end)
        part = replace(
            host,
            ids=host.ids[rows],
            loss_mask=host.loss_mask[rows],
            lengths=host.lengths[rows],
            anchors=host.anchors[anchor_edges[begin] : anchor_edges[end]],
            anchor_counts=host.anchor_counts[rows],
        )
        yield BatchPart(part, slice(int(token_edges[begin]), int(token_edges[end])))
        begin = end
