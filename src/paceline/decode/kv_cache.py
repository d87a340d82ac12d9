"""The target's cache while decoding: attention layers grow in place and are cut for nothing, recurrent state is copied.

Shape letters: B sequences, G key heads, C cached tokens, T new tokens, E head size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

SMALLEST = 256
"""Tokens that a layer has room for at first."""


class GrowingLayer(DynamicLayer):
    """Keys and values of an attention layer, [B, G, C, E], in storage that doubles.

    A layer with a window forgets what no later token can see, at the moment when its storage is full; until then, and
    for the tokens read last in any case, the mask hides it.

    Args:
        window: tokens that a token sees, itself included; None sees all.
        forgets: whether tokens outside the window may be dropped.

    Attributes:
        window: see above.
        dropped: tokens that were forgotten at the front.
        held: tokens in the storage.
    """

    def __init__(self, window: int | None = None, *, forgets: bool = True) -> None:
        super().__init__()
        self.window, self.dropped, self.held = window, 0, 0
        self.is_sliding = window is not None
        self._forgets = forgets and window is not None
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends [B, G, T, E]; gives all that are held."""
        if self._room is None:
            self.device, self.is_initialized = key_states.device, True
            room = max(key_states.shape[-2], SMALLEST)
            self._room = _moved(key_states, 0, 0, room), _moved(value_states, 0, 0, room)
        self.make_room(key_states.shape[-2])
        keys, values = self._room
        end = self.held + key_states.shape[-2]
        keys[:, :, self.held : end] = key_states
        values[:, :, self.held : end] = value_states
        self.held = end
        return keys[:, :, :end], values[:, :, :end]

    def make_room(self, count: int) -> None:
        """Grows where `count` more tokens do not fit; then, too, a layer with a window forgets."""
        if self._room is None or self.held + count <= self._room[0].shape[-2]:
            return
        begin = max(0, self.held - self.window + 1) if self._forgets and self.window is not None else 0
        kept = self.held - begin
        room = max(kept + count, 2 * kept, SMALLEST)
        self._room = _moved(self._room[0], begin, kept, room), _moved(self._room[1], begin, kept, room)
        self.held, self.dropped = kept, self.dropped + begin

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new tokens will meet."""
        return self.held + query_length, self.dropped

    def get_seq_length(self) -> int:
        """Tokens that were read and not taken back."""
        return self.dropped + self.held

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens; the number is negative, as in transformers."""
        self.held -= abs(tokens_to_remove) if self.is_initialized else 0

    def keep(self, columns: Tensor, start: int) -> None:
        """Of the tokens from `start` on keeps those at some places, in that order.

        Args:
            columns: int64 [M], relative to `start`; or [B, M], one row a sequence.
            start: position of the first token that is rearranged.
        """
        if self._room is None:
            return
        begin, count = start - self.dropped, columns.shape[-1]
        columns = columns.to(self.device)
        for room in self._room:
            newest = room[:, :, begin : self.held]
            if columns.dim() == 1:
                room[:, :, begin : begin + count] = newest.index_select(2, columns)
            else:
                shape = (-1, room.shape[1], -1, room.shape[3])
                room[:, :, begin : begin + count] = newest.gather(2, columns[:, None, :, None].expand(shape))
        self.held = begin + count

    def select_rows(self, rows: Tensor) -> None:
        """Keeps some of the sequences, int64."""
        if self._room is not None:
            self._room = self._room[0][rows.to(self.device)], self._room[1][rows.to(self.device)]

    def add_rows(self, other: GrowingLayer) -> None:
        """Takes the sequences of another layer below its own; columns beyond what one holds mean nothing."""
        if other._room is None:
            return
        held, rooms = max(self.held, other.held), [room for room in (self._room, other._room) if room is not None]
        room = max(held, *(pair[0].shape[2] for pair in rooms))
        parts = [
            (_moved(keys, 0, layer.held, room), _moved(values, 0, layer.held, room))
            for layer, (keys, values) in zip((self, other)[-len(rooms) :], rooms, strict=True)
        ]
        self.device, self.is_initialized = other.device, True
        self._room = torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts])
        self.held = held

    @property
    def num_bytes(self) -> int:
        """Of the tokens that are held; the storage may have room for as many again."""
        return sum(room[:, :, : self.held].nbytes for room in self._room or ())


def _moved(old: Tensor, begin: int, kept: int, room: int) -> Tensor:
    """New storage for `room` tokens that starts with `kept` of the old one's tokens, from `begin` on."""
    new = old.new_zeros(*old.shape[:2], room, old.shape[3])
    new[:, :, :kept] = old[:, :, begin : begin + kept]
    return new


def new_cache(config: Any, *, forgets: bool = True) -> Any:
    """An empty cache for a configuration, whose attention layers can all be cut.

    Args:
        config: of the model.
        forgets: see `GrowingLayer`.
    """
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = GrowingLayer(layer.sliding_window, forgets=forgets)
        elif type(layer) is DynamicLayer:
            cache.layers[index] = GrowingLayer()
        elif not is_recurrent(layer) and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    return cache


def is_recurrent(layer: Any) -> bool:
    """Whether a cache layer has state that cannot be cut."""
    return hasattr(layer, "recurrent_states") or hasattr(layer, "conv_states")


def layer_bytes(layer: Any) -> int:
    """Bytes of a cache layer's tensors."""
    if isinstance(layer, GrowingLayer):
        return layer.num_bytes
    return sum(tensor.nbytes for value in vars(layer).values() for tensor in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for entry in entries for tensor in _tensors(entry)]


def snapshot(layer: Any) -> dict[str, Any]:
    """State of a cache layer, apart from what it will change in place."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in vars(layer).items()
    }


def restore(layer: Any, state: dict[str, Any]) -> None:
    """Puts a layer's state back."""
    vars(layer).clear()
    vars(layer).update(state)
