"""Several sequences in the target while decoding, side by side in one cache.

Each sequence has a row of columns, and a table says which position of its sequence a column holds, or none: rejected
drafts, padding and the ends of shorter rows leave holes, which masks hide. When holes take too much, columns are moved.
Recurrent state has no columns: there each sequence keeps a cache for itself, and they are read one after another.

Shape letters: B sequences, T new tokens, C columns, V vocabulary, N taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.decode.kv_cache import GrowingLayer, new_cache
from paceline.decode.masked_forward import MaskedForward, Visibility, check_masks
from paceline.decode.session import TargetSession
from paceline.target_model.model import TargetModel

SPARE = 64
"""Columns beyond half of the longest sequence that may be holes."""


class BatchSession:
    """Reads tokens of several sequences at once.

    Attributes:
        lengths: tokens of each sequence.

    Raises:
        TargetError: the target takes no masks from outside; see `check_masks`.
    """

    def __init__(self, target: TargetModel) -> None:
        check_masks(target)
        self.target = target
        self.lengths: list[int] = []
        self._reader = MaskedForward(target)
        self._cache = new_cache(target.model.config, forgets=False)
        self._places = torch.zeros(0, 0, dtype=torch.int64, device=target.device)

    def add(self, session: TargetSession) -> None:
        """Takes a sequence that was begun alone, in a session that forgets nothing, as the last row."""
        columns = max(self._places.shape[1], session.length)
        grown = self._places.new_full((len(self.lengths) + 1, columns), -1)
        grown[:-1, : self._places.shape[1]] = self._places
        grown[-1, : session.length] = torch.arange(session.length, device=grown.device)
        for ours, theirs in zip(self._layers(), session.cache.layers, strict=True):
            ours.add_rows(theirs)
        self._places = grown
        self.lengths.append(session.length)

    def read(self, ids: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Appends tokens.

        Args:
            ids: int64 [B, T].
            counts: how many of each row's are tokens, from the left.

        Returns:
            Logits [B, T, V] and features [B, T, N·H]; meaningless beyond `counts`.
        """
        device, steps = ids.device, torch.arange(ids.shape[1], device=ids.device)
        lengths, real = (torch.tensor(values, device=device)[:, None] for values in (self.lengths, list(counts)))
        new = torch.where(steps < real, lengths + steps, -1)
        keys = torch.cat([self._places, new], dim=1)
        seen = (keys[:, None, :] >= 0) & (keys[:, None, :] <= new[:, :, None])
        output = self._reader.read(self._cache, ids, new.clamp_min(0), Visibility(seen, keys))
        self._places = keys
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return output

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets each row's tokens from a position on."""
        self.lengths = list(lengths)
        kept = self._places < torch.tensor(self.lengths, device=self._places.device)[:, None]
        self._places = torch.where(kept, self._places, -1)
        longest = max(self.lengths, default=0)
        if self._places.shape[1] > longest + longest // 2 + SPARE:
            order = torch.argsort((self._places < 0).to(torch.int8), dim=1, stable=True)[:, :longest]
            for layer in self._layers():
                layer.keep(order, 0)
            self._places = self._places.gather(1, order)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps some rows, in this order."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self._places.device)
        for layer in self._layers():
            layer.select_rows(index)
        self._places = self._places[index]
        self.lengths = [self.lengths[row] for row in rows]

    def _layers(self) -> list[GrowingLayer]:
        return [layer for layer in self._cache.layers if isinstance(layer, GrowingLayer)]


class SeparateRows:
    """Reads tokens of several sequences one after another; for targets with recurrent state. As `BatchSession`."""

    def __init__(self) -> None:
        self._rows: list[TargetSession] = []

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [row.length for row in self._rows]

    def add(self, session: TargetSession) -> None:
        """Takes a sequence that was begun alone, as the last row."""
        self._rows.append(session)

    def read(self, ids: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `BatchSession.read`; zeros beyond `counts`."""
        found = [
            row.read(ids[place, :count]) for place, (row, count) in enumerate(zip(self._rows, counts, strict=True))
        ]
        logits = pad_sequence([part for part, _ in found], batch_first=True)
        return logits, pad_sequence([part for _, part in found], batch_first=True)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets each row's tokens from a position on."""
        for row, length in zip(self._rows, lengths, strict=True):
            row.rewind(length)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps some rows, in this order."""
        self._rows = [self._rows[row] for row in rows]


def open_batch(target: TargetModel) -> BatchSession | SeparateRows:
    """Room for several sequences.

    Raises:
        TargetError: the target cannot continue from its cache, or takes no masks from outside.
    """
    return SeparateRows() if TargetSession(target).replays else BatchSession(target)
