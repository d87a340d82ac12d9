"""What every slot of a batch holds and must say. numpy only, on the host.

Shape letters: B documents, A anchors, K slots of a block, J drafts of a block (K - 1, or K when sampling from the
anchor), M supervised drafts of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.drafter.spec import DrafterSpec
from paceline.types import HostBatch


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """Blocks of a batch.

    Attributes:
        documents: document of each anchor, int64 [A].
        tokens: input tokens, int64 [A, K]: the anchor's token in slot 0, mask tokens after it.
        labels: token that each draft must say, int64 [A, J]; 0 where not live. Draft j (0-based) of anchor a is the
            token at position a + 1 + j.
        live: whether a draft is supervised, bool [A, J]: from the first position outside the document or the loss
            mask on, a block is dead.
        rows: index of each live draft's slot among all A·K slots, int64 [M].
        cells: index of each live draft among all A·J drafts, int64 [M].
        teacher_rows: packed token whose target state predicts each live draft, int64 [M]: the one before its label.
    """

    documents: np.ndarray
    tokens: np.ndarray
    labels: np.ndarray
    live: np.ndarray
    rows: np.ndarray
    cells: np.ndarray
    teacher_rows: np.ndarray


def build_blocks(host: HostBatch, spec: DrafterSpec) -> BlockInputs:
    """The blocks of a batch's anchors."""
    documents = np.repeat(np.arange(len(host.lengths)), host.anchor_counts)
    positions = host.anchors[:, None] + 1 + np.arange(spec.num_drafts)
    inside = positions < host.lengths[documents][:, None]
    # Rows are padded: a position is looked up in its own document only, and only inside it.
    safe = np.where(inside, positions, 0)
    supervised = inside & host.loss_mask[documents[:, None], safe]
    live = np.logical_and.accumulate(supervised, axis=1)
    tokens = np.full((len(documents), spec.block_size), spec.mask_token_id, np.int64)
    tokens[:, 0] = host.ids[documents, host.anchors]
    anchor, draft = np.nonzero(live)
    starts = np.cumsum(host.lengths) - host.lengths
    return BlockInputs(
        documents=documents,
        tokens=tokens,
        labels=np.where(live, host.ids[documents[:, None], safe], 0),
        live=live,
        rows=anchor * spec.block_size + draft + spec.first_draft_slot,
        cells=anchor * spec.num_drafts + draft,
        teacher_rows=starts[documents[anchor]] + host.anchors[anchor] + draft,
    )
