"""Where blocks stand over packed documents: the geometry that all layers and backends share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.device import to_device
from paceline.errors import DrafterError


@dataclass(frozen=True)
class Layout:
    """Blocks of packed documents.

    Attributes:
        anchors: position of each anchor in its document, int64 [A]; ascending within a document.
        starts: packed index of the first token of each anchor's document, int64 [A].
        documents: document of each anchor, int64 [A]; ascending.
        context_positions: position of each packed token in its document, int64 [S].
        context_documents: document of each packed token, int64 [S].
        block_size: slots of a block, K.
        device: where tensors of this layout live.
        masks: masks that a backend has built for this layout, by layer kind; draft layers of one kind share them.
    """

    anchors: np.ndarray
    starts: np.ndarray
    documents: np.ndarray
    context_positions: np.ndarray
    context_documents: np.ndarray
    block_size: int
    device: torch.device
    masks: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(
        doc_lengths: np.ndarray, anchors: np.ndarray, anchor_counts: np.ndarray, block_size: int, device: torch.device
    ) -> Layout:
        """Layout of documents packed one after another.

        Args:
            doc_lengths: tokens per document, int64 [B].
            anchors: positions within their documents, document after document, int64 [A].
            anchor_counts: anchors per document, int64 [B]; sums to A.
            block_size: slots of a block.
            device: of the tensors.

        Raises:
            DrafterError: counts and lengths do not fit each other, or anchors are out of range or not ascending.
        """
        lengths, counts = np.asarray(doc_lengths, np.int64), np.asarray(anchor_counts, np.int64)
        anchors = np.asarray(anchors, np.int64)
        if len(lengths) != len(counts) or counts.sum() != len(anchors):
            raise DrafterError(
                f"{len(anchors)} anchors and counts {counts.tolist()} do not fit {len(lengths)} documents; "
                "give one count a document"
            )
        documents = np.repeat(np.arange(len(lengths)), counts)
        if len(anchors) and ((anchors < 0) | (anchors > lengths[documents])).any():
            raise DrafterError("an anchor is outside its document; allowed: 0 to the document's length")
        if ((np.diff(anchors) <= 0) & (np.diff(documents) == 0)).any():
            raise DrafterError("anchors must be ascending within a document; sort them")
        starts = np.cumsum(lengths) - lengths
        context_documents = np.repeat(np.arange(len(lengths)), lengths)
        return Layout(
            anchors=anchors,
            starts=starts[documents],
            documents=documents,
            context_positions=np.arange(len(context_documents)) - starts[context_documents],
            context_documents=context_documents,
            block_size=block_size,
            device=device,
        )

    @property
    def num_context(self) -> int:
        """Packed context tokens, S."""
        return len(self.context_positions)

    @cached_property
    def slot_positions(self) -> Tensor:
        """Position of every slot in its document: anchor + slot, int64 [A, K]."""
        return self.tensor(self.anchors)[:, None] + torch.arange(self.block_size, device=self.device)

    @cached_property
    def ends(self) -> Tensor:
        """Packed index just after the last context token that each block may see, int64 [A]."""
        return self.tensor(self.starts + self.anchors)

    def tensor(self, values: np.ndarray) -> Tensor:
        """A host array on the layout's device."""
        return to_device(values, self.device)

    def ranges(self, window: int | None, causal: bool) -> np.ndarray:
        """What each slot sees: a run of packed context tokens and a run of slots of its own block, half-open.

        A block of anchor a sees the context of its document before a and all slots of its block, with `causal` none
        after the slot itself; a window counts from the slot.

        Returns:
            (context start, context end, slot start, slot end), int64 [4, A·K]; slots count over all blocks.
        """
        slot = np.arange(self.block_size)
        anchors, starts = self.anchors[:, None], self.starts[:, None]
        block = (np.arange(len(self.anchors)) * self.block_size)[:, None] + 0 * slot
        reach = anchors + slot if window is None else np.minimum(anchors + slot, window - 1)
        context_end = starts + anchors + 0 * slot
        context_start = np.minimum(starts + anchors + slot - reach, context_end)
        own_end = block + (slot + 1 if causal else self.block_size)
        own_start = block if window is None else block + np.maximum(slot - window + 1, 0)
        return np.stack([part.reshape(-1) for part in (context_start, context_end, own_start, own_end)])

    def groups(self, window: int | None, slots_at_once: int, multiple: int = 1) -> list[tuple[int, int, int, int]]:
        """Runs of anchors of one document with the context that they may see together.

        Args:
            window: window of the layer in tokens, or None.
            slots_at_once: slots of a group at most (at least one block).
            multiple: the width of each context is rounded up to this, beyond what may be seen and beyond all context.

        Returns:
            (first anchor, end anchor, first context index, end context index), packed indices, half-open.
        """
        per_group = max(1, slots_at_once // self.block_size)
        found = []
        edges = np.flatnonzero(np.diff(self.documents)) + 1
        for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(self.anchors)], strict=True):
            for first in range(begin, end, per_group):
                last = min(first + per_group, end)
                start = int(self.starts[first])
                low = start if window is None else start + max(0, int(self.anchors[first]) - window + 1)
                width = start + int(self.anchors[last - 1]) - low
                found.append((first, last, low, low + -(-width // multiple) * multiple))
        return found

    def block_mask(self, window: int | None, causal: bool) -> Tensor | None:
        """True where slot i (row) may not see slot j (column) of its own block, bool [K, K]; None if it sees all."""
        if not causal and (window is None or window >= self.block_size):
            return None
        slots = torch.arange(self.block_size, device=self.device)
        ahead = slots[None, :] - slots[:, None]
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if causal:
            hidden |= ahead > 0
        if window is not None:
            hidden |= -ahead >= window
        return hidden
