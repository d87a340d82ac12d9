"""The target's forward while decoding, with taps, and with masks from outside: for trees and for several sequences.

A mask from outside says which cached and new tokens a token sees. Layers that attend over a window get it narrowed by
the tokens' positions, which is why they are given theirs one by one.

Shape letters: B sequences, T new tokens, C cached and new tokens, V vocabulary, N taps, H hidden size.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.decode.kv_cache import GrowingLayer, new_cache
from paceline.errors import TargetError
from paceline.target_model.introspect import cache_name, forward_names, hooked, main_output
from paceline.target_model.model import TargetModel
from paceline.text import first_line

_checked: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Why a model takes no masks, by model; empty where it does."""
PROBE_ERROR = {torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Allowed relative error of the probe's logits; 1e-3 in wider types."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """What new tokens see.

    Attributes:
        seen: [B, T, C], True where a new token sees a cached or new one.
        key_positions: place of each cached and new token in its sequence, int64 [B, C].
    """

    seen: Tensor
    key_positions: Tensor


class MaskedForward:
    """Runs new tokens of one or several sequences through a target."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self._names = forward_names(target.model)
        name = cache_name(target.model)
        if name is None:
            raise TargetError(
                f"{target.facts.path}: {type(target.model).__name__} takes no key/value cache, so it cannot decode"
            )
        self._cache_name = name
        self._order = sorted(range(len(target.taps)), key=lambda place: target.taps[place])

    @torch.no_grad()
    def read(
        self,
        cache: Any,
        ids: Tensor,
        positions: Tensor,
        visibility: Visibility | None = None,
        *,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Appends tokens to a cache of `new_cache`.

        Args:
            cache: of all sequences.
            ids: int64 [B, T].
            positions: int64 [B, T].
            visibility: causal where None.
            last_only: logits of the last token alone.

        Returns:
            Logits [B, T, V] ([B, 1, V] with `last_only`) and features [B, T, N·H].
        """
        target, taps = self.target, []

        def tap(module: nn.Module, args: Any, output: Any) -> None:
            states = main_output(output)
            assert states is not None
            taps.append(states.to(target.device))

        arguments: dict[str, Any] = {"input_ids": ids, self._cache_name: cache, "use_cache": True}
        if target.structure.explicit_positions:
            arguments["position_ids"] = positions
        if last_only and "logits_to_keep" in self._names:
            arguments["logits_to_keep"] = 1
        # Layers with a window forget when they grow: before any mask is made.
        for cached in cache.layers:
            if isinstance(cached, GrowingLayer):
                cached.make_room(ids.shape[1])
        layers = target.structure.layers
        handles = [layers[target.taps[place]].register_forward_hook(tap) for place in self._order]
        if visibility is not None:
            arguments["attention_mask"] = _additive(visibility.seen, target.dtype)
            handles += self._window_hooks(cache, positions, visibility)
        with hooked(handles):
            output = target.model(**arguments)
        features = torch.cat([taps[self._order.index(place)] for place in range(len(taps))], dim=-1)
        return (output.logits[:, -1:] if last_only else output.logits), features

    def _window_hooks(self, cache: Any, positions: Tensor, visibility: Visibility) -> list[Any]:
        """Hooks that give each layer with a window its own mask."""
        masks: dict[tuple[int, int], Tensor] = {}
        handles = []
        for layer, cached in zip(self.target.structure.layers, cache.layers, strict=True):
            if not isinstance(cached, GrowingLayer) or cached.window is None:
                continue
            key = (cached.window, cached.dropped)
            if key not in masks:
                near = positions[:, :, None] - visibility.key_positions[:, None, :] < cached.window
                masks[key] = _additive((visibility.seen & near)[:, :, cached.dropped :], self.target.dtype)
            handles.append(layer.register_forward_pre_hook(_give(masks[key], self.target), with_kwargs=True))
        return handles


def check_masks(target: TargetModel) -> None:
    """Refuses a target that cannot read several continuations, or several sequences, at once.

    Layers must attend to the cached tokens only, and the model must give the same logits with a mask and positions from
    outside as with its own: a few tokens are read both ways and compared, once a model.

    Raises:
        TargetError: one line with the reason.
    """
    if target.model not in _checked:
        _checked[target.model] = _refusal(target)
    reason = _checked[target.model]
    if reason:
        raise TargetError(f"{target.facts.path}: {reason}; decode with the chain, one prompt at a time")


def _refusal(target: TargetModel) -> str:
    text = target.model.config.get_text_config(decoder=True)
    cache = new_cache(target.model.config)
    if not all(isinstance(layer, GrowingLayer) for layer in cache.layers):
        return "has recurrent layers, whose state cannot leave out rejected drafts of several prompts"
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        return "has layers that attend within chunks, for which no mask is made"
    if len(cache.layers) != len(target.structure.layers):
        return "caches another number of layers than it has"
    if not target.structure.explicit_positions:
        return "counts positions by itself, so drafts cannot be given their positions"
    implementation = getattr(target.model.config, "_attn_implementation", "eager")
    if implementation not in ("eager", "sdpa"):
        return f"attends by {implementation}, which takes no mask from outside; set target.attention to sdpa"
    reader, device = MaskedForward(target), target.device
    ids = torch.arange(5, device=device)[None] % target.facts.vocab_size
    try:
        plain, _ = reader.read(cache, ids, torch.arange(5, device=device)[None])
        # The same five as two sequences' worth of branches: 0, 1, then 2 3 4 beside a copy of 2 and 3.
        branches = torch.cat([ids, ids[:, 2:4]], dim=1)
        places = torch.tensor([[0, 1, 2, 3, 4, 2, 3]], device=device)
        seen = torch.ones(7, 7, dtype=torch.bool, device=device).tril()
        seen[5:, 2:5] = False
        own, _ = reader.read(new_cache(target.model.config), branches, places, Visibility(seen[None], places))
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return f"cannot be given a mask ({first_line(error)})"
    expected = torch.cat([plain, plain[:, 2:4]], dim=1).double()
    difference = float((own.double() - expected).norm() / expected.norm().clamp_min(1e-30))
    if not difference <= PROBE_ERROR.get(target.dtype, 1e-3):
        return f"gives other logits with a mask and positions from outside (relative difference {difference:.2g})"
    return ""


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask [B, 1, T, C] to be added to scores; finite in float32 too, which eager attention may take softmax in.

    Otherwise a row that sees nothing (padding) would become NaN, and so would whoever meets its values.
    """
    hidden = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, hidden)[:, None]


def _give(mask: Tensor, target: TargetModel) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "attention_mask" not in kwargs:
            raise TargetError(f"{target.facts.path}: its layers take no mask by name; decode with the chain")
        return args, {**kwargs, "attention_mask": mask}

    return hook
