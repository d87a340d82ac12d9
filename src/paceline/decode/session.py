"""One sequence in the target while decoding: its cache, its taps, its logits, and the way back after rejected drafts.

Attention caches are cut. Recurrent state (state-space and linear-attention layers) cannot be cut: it is kept aside
before tokens that may be rejected are read, put back, and the accepted tokens are read again. Several continuations are
read side by side, each with a copy of the state.

Shape letters: T tokens, V vocabulary, N taps, H hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.decode.kv_cache import GrowingLayer, forked, is_recurrent, layer_bytes, new_cache, restore, snapshot
from paceline.decode.masked_forward import PROBE_ERROR, MaskedForward, Visibility, check_masks
from paceline.errors import TargetError
from paceline.target_model.model import TargetModel
from paceline.text import first_line

TOKENS, FIRST, WRONG = 8, 3, 2
"""Tokens of the trial, how many of them are cached before the others follow, and how many are read and taken back."""
MOST_PATHS = 32
"""Continuations that are read in one forward at most; each has a copy of the cache."""
_paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Why a model cannot read several continuations, by model; empty where it can."""
_ways: weakref.WeakKeyDictionary[Any, bool | str] = weakref.WeakKeyDictionary()
"""Whether a model continues in blocks, by model; a text says why it cannot decode at all."""


class TargetSession:
    """Reads tokens of one sequence and remembers them in the target's cache.

    Attributes:
        length: tokens that the cache holds.
        replayed_tokens: tokens that had to be read again after rejections.
        cache: transformers' cache.

    Args:
        target: the model.
        forgets: whether layers with a window drop what is outside it.
        by_token: whether new tokens are read one by one behind cached ones; None: where the target needs it.

    Raises:
        TargetError: the target cannot continue from its cache; see `reads_blocks`.
    """

    def __init__(self, target: TargetModel, *, forgets: bool = True, by_token: bool | None = None) -> None:
        self.target = target
        self.length = 0
        self.replayed_tokens = 0
        self._reader = MaskedForward(target)
        self.cache = new_cache(target.model.config, forgets=forgets)
        self._recurrent = [index for index, layer in enumerate(self.cache.layers) if is_recurrent(layer)]
        if by_token is None:
            by_token = bool(self._recurrent) and not reads_blocks(target)
        self._by_token = by_token
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
            mask: [T, T], True where a token sees a new one; all see the cached ones, as far as windows allow. Causal
                where None. Only for targets that `branches`.

        Returns:
            Logits [T, V] ([1, V] with `last_only`) and features [T, N·H].
        """
        self._before = (self.length, {index: snapshot(self.cache.layers[index]) for index in self._recurrent})
        self._read_since = [ids]
        if positions is None:
            positions = torch.arange(self.length, self.length + ids.shape[0], device=ids.device)
        seen = None
        if mask is not None:
            cached = torch.arange(self.length, device=ids.device)
            everything = mask.new_ones(ids.shape[0], self.length)
            seen = Visibility(torch.cat([everything, mask], dim=1)[None], torch.cat([cached, positions])[None])
        # Where the state takes no block, tokens follow one by one.
        size = 1 if self._by_token and self.length else max(1, ids.shape[0])
        found = [
            self._reader.read(self.cache, some[None], places[None], seen, last_only=last_only)
            for some, places in zip(ids.split(size), positions.split(size), strict=True)
        ]
        self.length += ids.shape[0]
        if len(found) == 1:
            return found[0][0][0], found[0][1][0]
        logits = found[-1][0][0] if last_only else torch.cat([entry[0][0] for entry in found])
        return logits, torch.cat([entry[1][0] for entry in found])

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
        cut = self.length - start if replay else removed
        for index, layer in enumerate(self.cache.layers):
            if index not in states:
                layer.crop(-cut)
            elif replay:
                restore(layer, states[index])
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
        return bool(self._recurrent)

    @torch.no_grad()
    def read_paths(self, ids: Tensor, paths: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Reads several continuations side by side; the session stays as it is.

        Args:
            ids: int64 [T].
            paths: of each continuation the places of its tokens in `ids`; every place is in one of them.

        Returns:
            Logits [T, V] and features [T, N·H] of each place, behind the tokens before it in its path.
        """
        width = max(map(len, paths))
        places = torch.tensor([[*path, *[path[0]] * (width - len(path))] for path in paths], device=ids.device)
        where = {place: (row, step) for row, path in enumerate(paths) for step, place in enumerate(path)}
        found: list[tuple[Tensor, Tensor]] = []
        for some in places.split(MOST_PATHS):
            cache = forked(self.cache, self.target.model.config, len(some))
            positions = torch.arange(self.length, self.length + width, device=ids.device).expand(len(some), -1)
            size = 1 if self._by_token and self.length else width
            parts = [
                self._reader.read(cache, ids[columns], at)
                for columns, at in zip(some.split(size, dim=1), positions.split(size, dim=1), strict=True)
            ]
            found.append((torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts], 1)))
        rows, steps = torch.tensor([where[place] for place in range(len(ids))], device=ids.device).T
        return torch.cat([part[0] for part in found])[rows, steps], torch.cat([part[1] for part in found])[rows, steps]

    def check_branches(self) -> None:
        """Refuses a target in which several continuations cannot be read at once.

        Raises:
            TargetError: one line; see `check_masks`.
        """
        if self.replays:
            check_paths(self.target)
        else:
            check_masks(self.target)

    def keep_places(self, start: int, places: Tensor) -> None:
        """Keeps, of the tokens read at `start` and after, those at the given places, in that order.

        Args:
            start: tokens before it stay.
            places: int64 [M] relative to `start`.
        """
        for layer in self.cache.layers:
            if isinstance(layer, GrowingLayer):
                layer.keep(places, start)
        self.length = start + places.shape[0]

    @property
    def used_bytes(self) -> int:
        """Bytes of the cached tokens and of recurrent state."""
        return sum(layer_bytes(layer) for layer in self.cache.layers)


def check_paths(target: TargetModel) -> None:
    """Refuses a target with recurrent layers whose state cannot be copied for several continuations.

    A few tokens are read as two continuations and one after the other, once a model.

    Raises:
        TargetError: one line with the reason.
    """
    if target.model not in _paths:
        _paths[target.model] = _path_error(target)
    if reason := _paths[target.model]:
        raise TargetError(f"{target.facts.path}: {reason}; decode with the chain")


@torch.no_grad()
def _path_error(target: TargetModel) -> str:
    ids = torch.arange(TOKENS, device=target.device) * 7 % target.facts.vocab_size
    paths = [[0, 1, 2], [0, 3]]
    session = TargetSession(target)
    session.read(ids[:FIRST])
    try:
        found, _ = session.read_paths(ids[FIRST : FIRST + 4], paths)
        for path in paths:
            alone, _ = session.read(ids[FIRST : FIRST + 4][path])
            session.rewind(FIRST)
            difference = float((found[path] - alone).norm() / alone.norm().clamp_min(1e-30))
            if not difference <= PROBE_ERROR.get(target.dtype, 1e-3):
                return f"gives other logits for several continuations at once (relative difference {difference:.2g})"
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return f"cannot read several continuations at once ({first_line(error)})"
    return ""


def reads_blocks(target: TargetModel) -> bool:
    """Whether several tokens at once may follow cached ones; where not, they are read one by one.

    Some implementations of state-space and linear-attention layers start a block of several tokens afresh instead of
    continuing from the cached state, and some keep their state where it cannot be put back. That answers wrongly
    without an error, so a few tokens are read both ways, once a model.

    Raises:
        TargetError: not even token by token gives what one forward over all tokens gives.
    """
    if target.model not in _ways:
        _ways[target.model] = _try_out(target)
    way = _ways[target.model]
    if isinstance(way, str):
        raise TargetError(f"{target.facts.path}: {way}, so it cannot decode; it can still be trained for")
    return way


@torch.no_grad()
def _try_out(target: TargetModel) -> bool | str:
    ids = torch.arange(TOKENS, device=target.device) * 7 % target.facts.vocab_size
    allowed, difference = PROBE_ERROR.get(target.dtype, 1e-3), 0.0
    try:
        whole = target.model(input_ids=ids[None], use_cache=False).logits[0].double()
        for by_token in (False, True):
            session = TargetSession(target, by_token=by_token)
            first, _ = session.read(ids[:FIRST])
            session.read(ids[:WRONG])
            session.rewind(FIRST)
            found = torch.cat([first, session.read(ids[FIRST:])[0]]).double()
            difference = float((found - whole).norm() / whole.norm().clamp_min(1e-30))
            if difference <= allowed:
                return not by_token
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return f"{type(target.model).__name__} fails when it continues from its cache ({first_line(error)})"
    return (
        f"{type(target.model).__name__} gives other logits from its cache than in one forward (relative "
        f"difference {difference:.2g})"
    )
