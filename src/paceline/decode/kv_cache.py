"""What is cached while decoding.

The target's attention layers grow in place and are cut without a copy; its recurrent state is saved and put back. The
drafter's context is a store of keys and values.

Shape letters: B sequences, G key heads, C cached tokens, T new tokens, E head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
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
            self._room = enlarged(key_states, room, 0, 0), enlarged(value_states, room, 0, 0)
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
        self._room = enlarged(self._room[0], room, begin, kept), enlarged(self._room[1], room, begin, kept)
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

    def repeated(self, count: int) -> GrowingLayer:
        """A layer of several sequences, each with the tokens of this one's only sequence."""
        copy = GrowingLayer(self.window, forgets=False)
        copy.dropped, copy.held = self.dropped, self.held
        if self._room is not None:
            copy.device, copy.is_initialized = self.device, True
            keys, values = (part[:, :, : self.held].expand(count, -1, -1, -1) for part in self._room)
            room = max(2 * self.held, SMALLEST)
            copy._room = enlarged(keys, room), enlarged(values, room)
        return copy

    def add_rows(self, other: GrowingLayer) -> None:
        """Takes the sequences of another layer below its own; columns beyond what one holds mean nothing."""
        if other._room is None:
            return
        held, rooms = max(self.held, other.held), [room for room in (self._room, other._room) if room is not None]
        room = max(held, *(pair[0].shape[2] for pair in rooms))
        parts = [
            (enlarged(keys, room, 0, layer.held), enlarged(values, room, 0, layer.held))
            for layer, (keys, values) in zip((self, other)[-len(rooms) :], rooms, strict=True)
        ]
        self.device, self.is_initialized = other.device, True
        self._room = torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts])
        self.held = held

    @property
    def num_bytes(self) -> int:
        """Of the tokens that are held; the storage may have room for as many again."""
        return sum(room[:, :, : self.held].nbytes for room in self._room or ())


def enlarged(old: Tensor, room: int, begin: int = 0, kept: int | None = None) -> Tensor:
    """New storage [..., room, E] that starts with tokens of the old one, [..., C, E]; zeros behind them.

    Zeros and not fresh memory: masked columns have weight 0, and 0 times what is in fresh memory may be NaN.

    Args:
        old: storage of before.
        room: tokens of the new one.
        begin: first token that is copied.
        kept: how many are copied; None: all from `begin` on.
    """
    kept = old.shape[-2] - begin if kept is None else kept
    new = old.new_zeros(*old.shape[:-2], room, old.shape[-1])
    new[..., :kept, :] = old[..., begin : begin + kept, :]
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


def forked(cache: Any, config: Any, count: int) -> Any:
    """A cache of several sequences, each of which has read what the one sequence of this cache has.

    Args:
        cache: of `new_cache`, of one sequence; it stays as it is.
        config: of the model.
        count: sequences of the new one.
    """
    copies = new_cache(config)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, GrowingLayer):
            copies.layers[index] = layer.repeated(count)
        else:
            state = {name: _repeated(value, count) for name, value in snapshot(layer).items()}
            restore(copies.layers[index], state)
    return copies


def _repeated(value: Any, count: int) -> Any:
    if isinstance(value, Tensor):
        return value.repeat_interleave(count, dim=0) if value.dim() > 1 and value.shape[0] == 1 else value
    if isinstance(value, dict):
        return {key: _repeated(entry, count) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_repeated(entry, count) for entry in value)
    return value


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


class ContextStore:
    """Keys and values of a context, per draft layer; storage doubles, so that appending costs constant time on average.

    Attributes:
        stored: tokens whose keys and values are stored.
    """

    def __init__(self, num_layers: int, key_heads: int, head_dim: int) -> None:
        self.stored = 0
        self._num_layers = num_layers
        self._sizes = (key_heads, head_dim)
        self._layers: list[tuple[Tensor, Tensor]] = []

    def append(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Adds rotated keys and values [G, T, E] of the next T tokens, one pair a draft layer."""
        count = parts[0][0].shape[1]
        self.make_room(count, parts[0][0])
        for index, (keys, values) in enumerate(parts):
            self.write(index, self.stored, keys.transpose(0, 1), values.transpose(0, 1))
        self.stored += count

    def make_room(self, count: int, like: Tensor) -> None:
        """Storage for `count` more tokens than are stored, of the type and on the device of `like`."""
        if self.capacity >= self.stored + count:
            return
        capacity = max(self.stored + count, 2 * self.stored, SMALLEST)
        self._layers = [
            (enlarged(keys, capacity, 0, self.stored), enlarged(values, capacity, 0, self.stored))
            for keys, values in self.layers(like)
        ]

    def write(self, index: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Puts keys and values [T, G, E] of layer `index` at `start`; gives all up to their end, [G, start + T, E]."""
        end = start + keys.shape[0]
        stored_keys, stored_values = self._layers[index]
        stored_keys[:, start:end] = keys.transpose(0, 1)
        stored_values[:, start:end] = values.transpose(0, 1)
        return stored_keys[:, :end], stored_values[:, :end]

    @property
    def capacity(self) -> int:
        """Tokens for which there is storage."""
        return self._layers[0][0].shape[1] if self._layers else 0

    def layers(self, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [G, capacity, E] of every draft layer; what is beyond `stored` means nothing.

        Args:
            like: gives type and device while nothing is stored.
        """
        nothing = like.new_zeros(self._sizes[0], 0, self._sizes[1])
        return self._layers or [(nothing, nothing)] * self._num_layers
