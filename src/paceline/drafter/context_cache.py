"""The keys and values of a sequence's context, per draft layer, while decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.drafter.fast_draft import FusedWeights


class ContextCache:
    """Grows by `append`, shrinks by `crop`; storage doubles, so that appending costs constant time on average.

    Features of the newest tokens may wait: the next block then brings their keys and values along.

    Attributes:
        stored: tokens whose keys and values are stored.
        waiting: features [T, N·H] of the tokens after these.
        weights: with which a network drafts for this sequence; None before the first features.
    """

    def __init__(self, num_layers: int, key_heads: int, head_dim: int) -> None:
        self.stored = 0
        self.waiting: list[Tensor] = []
        self.weights: FusedWeights | None = None
        self._num_layers = num_layers
        self._sizes = (key_heads, head_dim)
        self._store: list[tuple[Tensor, Tensor]] = []

    @property
    def length(self) -> int:
        """Tokens of the context, waiting ones included."""
        return self.stored + sum(part.shape[0] for part in self.waiting)

    def append(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Adds rotated keys and values [G, T, E] of the next T tokens, one pair a draft layer; none may wait."""
        count = parts[0][0].shape[1]
        self.make_room(count, parts[0][0])
        for index, (keys, values) in enumerate(parts):
            self.write(index, self.stored, keys.transpose(0, 1), values.transpose(0, 1))
        self.stored += count

    def make_room(self, count: int, like: Tensor) -> None:
        """Storage for `count` more tokens than are stored, of the type and on the device of `like`."""
        if self._store and self.capacity >= self.stored + count:
            return
        capacity = max(self.stored + count, 2 * self.stored, 256)
        old = self._store or [(None, None)] * self._num_layers
        self._store = [
            (self._larger(keys, capacity, like), self._larger(values, capacity, like)) for keys, values in old
        ]

    def write(self, index: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Puts keys and values [T, G, E] of layer `index` at `start`; gives all up to their end, [G, start + T, E]."""
        end = start + keys.shape[0]
        stored_keys, stored_values = self._store[index]
        stored_keys[:, start:end] = keys.transpose(0, 1)
        stored_values[:, start:end] = values.transpose(0, 1)
        return stored_keys[:, :end], stored_values[:, :end]

    def settle(self, count: int) -> None:
        """The `count` tokens that waited are stored; what was written behind them means nothing."""
        self.stored += count
        self.waiting.clear()

    def crop(self, length: int) -> None:
        """Forgets all tokens from position `length` on."""
        length = max(0, length)
        kept, room = [], length - self.stored
        for part in self.waiting:
            if room > 0:
                kept.append(part[:room])
            room -= part.shape[0]
        self.waiting, self.stored = kept, min(self.stored, length)

    @property
    def capacity(self) -> int:
        """Tokens for which there is storage."""
        return self._store[0][0].shape[1] if self._store else 0

    def layers(self, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [G, capacity, E] of every draft layer, as they lie: what is beyond `stored` means nothing.

        Args:
            like: gives type and device while nothing is stored.
        """
        if not self._store:
            nothing = like.new_zeros(self._sizes[0], 0, self._sizes[1])
            return [(nothing, nothing)] * self._num_layers
        return self._store

    def _larger(self, old: Tensor | None, capacity: int, like: Tensor) -> Tensor:
        # Zeros: masked columns have weight 0, and 0 times what lies in fresh memory may be no number.
        room = torch.zeros(self._sizes[0], capacity, self._sizes[1], dtype=like.dtype, device=like.device)
        if old is not None:
            room[:, : self.stored] = old[:, : self.stored]
        return room
