"""How a target with recurrent layers may be read while decoding: in blocks, or token by token.

Some implementations of state-space and linear-attention layers start a block of several tokens afresh instead of going
on from the cached state, and some keep their state where it cannot be put back. That answers wrongly without an error,
so a few tokens are read both ways, once a model.

Shape letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.decode.masked_forward import PROBE_ERROR
from paceline.errors import TargetError
from paceline.target_model.model import TargetModel

TOKENS, FIRST, WRONG = 8, 3, 2
"""Tokens of the trial, how many of them are cached before the others follow, and how many are read and taken back."""
_ways: weakref.WeakKeyDictionary[Any, bool | str] = weakref.WeakKeyDictionary()
"""Whether a model goes on in blocks, by model; a text says why it cannot decode at all."""


class Session(Protocol):
    """What the trial needs of a session."""

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Appends tokens; logits [T, V] and features."""
        ...

    def rewind(self, length: int) -> None:
        """Forgets tokens from a position on."""
        ...


def reads_blocks(target: TargetModel, begin: Callable[[bool], Session]) -> bool:
    """Whether several tokens at once may follow cached ones; where not, they are read one by one.

    Args:
        target: the model.
        begin: an empty session that reads token by token, or not.

    Raises:
        TargetError: not even token by token gives what one forward over all tokens gives.
    """
    if target.model not in _ways:
        _ways[target.model] = _try_out(target, begin)
    way = _ways[target.model]
    if isinstance(way, str):
        raise TargetError(f"{target.facts.path}: {way}, so it cannot decode; it can still be trained for")
    return way


@torch.no_grad()
def _try_out(target: TargetModel, begin: Callable[[bool], Session]) -> bool | str:
    ids = torch.arange(TOKENS, device=target.device) * 7 % target.facts.vocab_size
    allowed, difference = PROBE_ERROR.get(target.dtype, 1e-3), 0.0
    try:
        whole = target.model(input_ids=ids[None], use_cache=False).logits[0].double()
        for by_token in (False, True):
            session = begin(by_token)
            first, _ = session.read(ids[:FIRST])
            session.read(ids[:WRONG])
            session.rewind(FIRST)
            found = torch.cat([first, session.read(ids[FIRST:])[0]]).double()
            difference = float((found - whole).norm() / whole.norm().clamp_min(1e-30))
            if difference <= allowed:
                return not by_token
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"{type(target.model).__name__} fails when it goes on from its cache ({said})"
    return (
        f"{type(target.model).__name__} goes on from its cache otherwise than in one forward (relative difference of "
        f"its logits {difference:.2g})"
    )
