"""One sequence in the target while decoding: its cache, its taps, its logits, and the way back after rejected drafts.

Attention caches are cut. Recurrent state (state-space and linear-attention layers) cannot be cut: it is kept aside
before tokens that may be rejected are read, put back, and the accepted tokens are read again.

Shape letters: T tokens, V vocabulary, N taps, H hidden size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import TargetError
from paceline.target.frozen import Target
from paceline.target.structure import cache_name, forward_names, hooked, main_output


class TargetSession:
    """Reads tokens of one sequence and remembers them in the target's cache.

    Attributes:
        length: tokens that the cache holds.
        replayed_tokens: tokens that had to be read again after rejections.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.length = 0
        self.replayed_tokens = 0
        self._names = forward_names(target.model)
        self._cache_name = cache_name(target.model)
        if self._cache_name is None:
            raise TargetError(
                f"{target.facts.path}: {type(target.model).__name__} takes no key/value cache, so it cannot decode"
            )
        self._cache = new_cache(target.model.config)
        self._before: tuple[int, dict[int, dict[str, Any]]] = (0, {})
        self._read_since: list[Tensor] = []

    @torch.no_grad()
    def read(
        self,
        ids: Tensor,
        *,
        last_only: bool = False,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Appends tokens.

        Args:
            ids: int64 [T], on the target's device.
            last_only: logits of the last token alone.
            positions: int64 [T]; consecutive from `length` where None.
            mask: [T, length + T], True where a token sees a cached or new one; causal where None.

        Returns:
            Logits [T, V] ([1, V] with `last_only`) and features [T, N·H].
        """
        taps: list[Tensor] = []

        def tap(module: nn.Module, args: Any, output: Any) -> None:
            states = main_output(output)
            assert states is not None
            taps.append(states[0].to(self.target.device))

        self._keep_state()
        layers = self.target.structure.layers
        order = sorted(range(len(self.target.taps)), key=lambda place: self.target.taps[place])
        handles = [layers[self.target.taps[place]].register_forward_hook(tap) for place in order]
        with hooked(handles):
            output = self.target.model(**self._arguments(ids, last_only, positions, mask))
        self._read_since.append(ids)
        self.length += ids.shape[0]
        logits = output.logits[0]
        features = torch.cat([taps[order.index(place)] for place in range(len(order))], dim=-1)
        return (logits[-1:] if last_only else logits), features

    def rewind(self, length: int) -> None:
        """Forgets all tokens from position `length` on; at most those of the last `read`.

        Raises:
            TargetError: earlier tokens would have to be forgotten.
        """
        start, states = self._before
        if not start <= length <= self.length:
            raise TargetError(f"a sequence of {self.length} tokens can be rewound to {start} or later, not to {length}")
        removed = self.length - length
        replay = bool(states) and removed > 0
        for index, layer in enumerate(self._cache.layers):
            if index in states:
                if replay:
                    _restore(layer, states[index])
            else:
                layer.crop(-(self.length - start if replay else removed))
        if replay:
            again = torch.cat(self._read_since)[: length - start]
            self.length = start
            if again.shape[0]:
                self.read(again, last_only=True)
                self.rewind(length)
                self.replayed_tokens += again.shape[0]
        self.length = length

    @property
    def replays(self) -> bool:
        """Whether the target has state that cannot be cut, so that rejected drafts cost a second forward."""
        return any(_is_recurrent(layer) for layer in self._cache.layers)

    @property
    def cuts_anywhere(self) -> bool:
        """Whether any of the tokens read last can be forgotten: all layers attend, none over a window alone."""
        return not any(_is_recurrent(layer) or getattr(layer, "is_sliding", False) for layer in self._cache.layers)

    def keep_places(self, start: int, places: Tensor) -> None:
        """Keeps, of the tokens read at `start` and after, those at the given places, in that order.

        Args:
            start: tokens before it stay.
            places: int64 [M] relative to `start`.
        """
        if not self.cuts_anywhere:
            raise TargetError(f"{self.target.facts.path}: recurrent or sliding layers cannot be rearranged")
        kept = torch.cat([torch.arange(start, device=places.device), start + places])
        for layer in self._cache.layers:
            if layer.keys is not None:
                index = kept.to(layer.keys.device)
                layer.keys, layer.values = layer.keys.index_select(2, index), layer.values.index_select(2, index)
        self.length = kept.shape[0]

    def _arguments(self, ids: Tensor, last_only: bool, positions: Tensor | None, mask: Tensor | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": ids[None], str(self._cache_name): self._cache, "use_cache": True}
        if self.target.structure.explicit_positions:
            if positions is None:
                positions = torch.arange(self.length, self.length + ids.shape[0], device=ids.device)
            arguments["position_ids"] = positions[None]
        if last_only and "logits_to_keep" in self._names:
            arguments["logits_to_keep"] = 1
        if mask is not None:
            worst = torch.finfo(self.target.dtype).min
            arguments["attention_mask"] = torch.zeros(mask.shape, dtype=self.target.dtype, device=ids.device)[
                None, None
            ].masked_fill(~mask, worst)
        return arguments

    def _keep_state(self) -> None:
        states = {index: _snapshot(layer) for index, layer in enumerate(self._cache.layers) if _is_recurrent(layer)}
        self._before, self._read_since = (self.length, states), []


def new_cache(config: Any) -> Any:
    """An empty cache for a configuration whose attention layers can all be cut.

    Sliding layers drop old keys, after which a cut is impossible; they are told to keep what a cut may need, or, in
    versions of transformers that cannot, replaced by layers that keep everything (the mask still slides).
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if _is_recurrent(layer) or not getattr(layer, "is_sliding", False):
            continue
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
        else:
            cache.layers[index] = DynamicLayer()
    return cache


def _is_recurrent(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states") or hasattr(layer, "conv_states")


def _snapshot(layer: Any) -> dict[str, Any]:
    """State of a cache layer, apart from what it will change in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in vars(layer).items()
    }


def _restore(layer: Any, state: dict[str, Any]) -> None:
    vars(layer).clear()
    vars(layer).update(state)
