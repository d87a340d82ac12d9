"""The keys and values of a sequence's context, per draft layer, while decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ContextCache:
    """Grows by `append`, shrinks by `crop`; storage doubles, so that appending costs constant time on average."""

    def __init__(self, num_layers: int, key_heads: int, head_dim: int) -> None:
        self.length = 0
        self._num_layers = num_layers
        self._sizes = (key_heads, head_dim)
        self._store: list[tuple[Tensor, Tensor]] = []

    def append(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Adds rotated keys and values [G, T, E] of the next T tokens, one pair a draft layer."""
        count = parts[0][0].shape[1]
        end = self.length + count
        if not self._store or self._store[0][0].shape[1] < end:
            self._grow(parts, max(end, 2 * self.length, 256))
        for (keys, values), (new_keys, new_values) in zip(self._store, parts, strict=True):
            keys[:, self.length : end] = new_keys
            values[:, self.length : end] = new_values
        self.length = end

    def crop(self, length: int) -> None:
        """Forgets all tokens from position `length` on."""
        self.length = max(0, min(self.length, length))

    @property
    def capacity(self) -> int:
        """Tokens for which there is storage."""
        return self._store[0][0].shape[1] if self._store else 0

    def layers(self, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [G, capacity, E] of every draft layer, as they lie: what is beyond `length` means nothing.

        Args:
            like: gives type and device while nothing is stored.
        """
        if not self._store:
            nothing = like.new_zeros(self._sizes[0], 0, self._sizes[1])
            return [(nothing, nothing)] * self._num_layers
        return self._store

    def _grow(self, parts: Sequence[tuple[Tensor, Tensor]], capacity: int) -> None:
        def larger(old: Tensor | None, new: Tensor) -> Tensor:
            # Zeros: masked columns have weight 0, and 0 times what lies in fresh memory may be no number.
            room = torch.zeros(new.shape[0], capacity, new.shape[2], dtype=new.dtype, device=new.device)
            if old is not None:
                room[:, : self.length] = old[:, : self.length]
            return room

        old = self._store or [(None, None)] * len(parts)
        self._store = [(larger(a, x), larger(b, y)) for (a, b), (x, y) in zip(old, parts, strict=True)]
