"""One sequence in the drafter while decoding: the keys and values of its context, and the next block drafted from them.

Shape letters: T context tokens, K slots, N taps, H hidden size, D hidden size of the drafter, G key heads, E head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.decode.fast_draft import FusedWeights, fused_weights
from paceline.decode.kv_cache import ContextStore
from paceline.errors import DrafterError

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter
    from paceline.drafter.spec import DrafterSpec

MOST_WAITING = 64
"""Context rows that may wait for the next block; more, as a prompt has, would compute queries for nothing."""


class DraftSession:
    """Takes the features of a sequence's tokens and drafts blocks after them.

    Features of the newest tokens wait: the next block brings their keys and values along (`FusedWeights.draft`).

    Args:
        network: the drafter, whose weights do not change while the session is used. With ``attention="auto"`` the
            fast path of `fast_draft` is used, with the name of a backend `Drafter.draft_blocks`, the slow reference.
    """

    def __init__(self, network: Drafter) -> None:
        self._network = network
        self._fast = network.attention == "auto"
        self._waiting: list[Tensor] = []
        spec = network.spec
        self.store = ContextStore(spec.num_layers, spec.num_key_value_heads, spec.head_dim)
        self._weights: FusedWeights | None = None

    @property
    def spec(self) -> DrafterSpec:
        """Of the drafter."""
        return self._network.spec

    @property
    def length(self) -> int:
        """Tokens of the context, waiting ones included."""
        return self.store.stored + sum(part.shape[0] for part in self._waiting)

    @torch.no_grad()
    def extend(self, features: Tensor) -> None:
        """Takes the features [T, N·H] of the tokens at positions `length`, `length` + 1, ..."""
        if not self._fast:
            positions = torch.arange(self.length, self.length + features.shape[0], device=features.device)
            self.store.append(self._network.context_parts(features, positions))
            return
        self._waiting.append(features)
        if self.length - self.store.stored > MOST_WAITING:
            self._settle()

    def crop(self, length: int) -> None:
        """Forgets all tokens from position `length` on."""
        length = max(0, length)
        kept, room = [], length - self.store.stored
        for part in self._waiting:
            if room > 0:
                kept.append(part[:room])
            room -= part.shape[0]
        self._waiting, self.store.stored = kept, min(self.store.stored, length)

    @torch.no_grad()
    def draft(self, block_embeddings: Tensor, position: int) -> Tensor:
        """Hidden states of one block.

        Args:
            block_embeddings: embedded slots [K, D]: the anchor's token, then mask tokens.
            position: of the anchor in the sequence, at most `length`; only tokens before it are seen.

        Returns:
            Final normalized hidden states [K, D].

        Raises:
            DrafterError: the context ends before the anchor.
        """
        length = self.length
        if length < position:
            raise DrafterError(f"the context holds {length} tokens; a block at {position} needs {position}")
        if self._fast and length == position:
            waiting = torch.cat(self._waiting) if self._waiting else None
            hidden = self._copied(block_embeddings).draft(self.store, waiting, block_embeddings)
            self._waiting.clear()
            return hidden
        self._settle()
        layers, capacity = self.store.layers(block_embeddings), self.store.capacity
        return self._network.draft_blocks(layers, capacity, [position], block_embeddings[None])[0]

    def _copied(self, like: Tensor) -> FusedWeights:
        if self._weights is None:
            self._weights = fused_weights(self._network, like.dtype)
        return self._weights

    def _settle(self) -> None:
        """Stores keys and values of the tokens that wait."""
        if self._waiting:
            features = torch.cat(self._waiting)
            self._copied(features).extend(self.store, features)
            self._waiting.clear()
