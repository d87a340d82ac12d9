"""The decode loop of one sequence: read the prompt, then pass after pass until the answer ends.

How a pass gets its tokens is a strategy's business: one token without drafts (`Plain`), a chain of drafts (`Chain` in
`chain.py`), a draft tree (`Tree` in `tree.py`). After every pass both caches hold exactly the tokens that are kept.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.decode.answers import Answer, Decoded, Pass, prompt_tensor
from paceline.decode.draft_session import DraftSession
from paceline.decode.sampling import Greedy, TokenChooser
from paceline.decode.session import TargetSession

if TYPE_CHECKING:
    from paceline.drafter.spec import DrafterSpec
    from paceline.target_model.model import TargetModel

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
OnTokens = Callable[[list[int], int], None]
"""Called with the tokens that a pass added to an answer, and how many of a pass's first tokens are accepted drafts."""


@dataclass(frozen=True, slots=True)
class PassTokens:
    """What one pass gave.

    Attributes:
        tokens: accepted drafts and, last, the target's own token.
        num_drafts: how many drafts were verified; None where nothing was drafted.
    """

    tokens: list[int]
    num_drafts: int | None = None


class Strategy(Protocol):
    """Makes the passes of one answer."""

    def begin(self, features: Tensor) -> None:
        """Takes the features [T, N·H] of the prompt."""
        ...

    def advance(self, session: TargetSession, token: int, room: int) -> PassTokens:
        """Makes one pass from the newest token, and leaves in the session what is kept and nothing else.

        Args:
            session: holds all tokens before `token`.
            token: the newest token of the answer.
            room: tokens that may still be added to the answer.
        """
        ...


class Plain:
    """One token a pass, from the target alone."""

    def __init__(self, choice: TokenChooser) -> None:
        self._choice = choice

    def begin(self, features: Tensor) -> None:
        """Needs no features."""

    def advance(self, session: TargetSession, token: int, room: int) -> PassTokens:
        """Reads the newest token and chooses the next."""
        logits, _ = session.read(torch.tensor([token], device=session.target.device), last_only=True)
        session.rewind(session.length)
        return PassTokens([self._choice.token(logits[-1])])


def inference(
    decode: Callable[Concatenate[TargetModel, Arguments], Returned],
) -> Callable[Concatenate[TargetModel, Arguments], Returned]:
    """Runs a decode function in torch's inference mode."""

    @functools.wraps(decode)
    def run(target: TargetModel, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        # Made before and kept by the target: training may use it later, which it could not if made inside.
        _ = target.embedding
        with torch.inference_mode():
            return decode(target, *args, **kwargs)

    return run


def decode_prompt(
    target: TargetModel,
    prompt_ids: Sequence[int],
    strategy: Strategy,
    choice: TokenChooser,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    branches: bool = False,
    on_tokens: OnTokens | None = None,
) -> Decoded:
    """Answers one prompt.

    Args:
        target: the verifying model.
        prompt_ids: tokens of the prompt, at least one.
        strategy: makes the passes.
        choice: chooses the first token.
        max_new_tokens: longest answer, exact to the token.
        stop_ids: tokens that end an answer.
        branches: whether several continuations are read at once, which not every target can.
        on_tokens: see `OnTokens`.

    Raises:
        DataError: an empty prompt, or one longer than the target's positions.
        TargetError: the target cannot decode, or not with branches.
    """
    started = time.perf_counter()
    answer = Answer(len(prompt_ids), target, max_new_tokens, stop_ids)
    session = TargetSession(target)
    if branches:
        session.check_branches()
    logits, features = session.read(prompt_tensor(prompt_ids, target), last_only=True)
    strategy.begin(features)
    token = choice.token(logits[-1])
    answer.add([token])
    prompted = time.perf_counter()
    if on_tokens is not None:
        on_tokens([token], 0)
    passes: list[Pass] = []
    while answer.finish is None:
        position, before = session.length, len(answer.ids)
        found = strategy.advance(session, token, answer.room)
        if found.num_drafts is None:
            answer.add(found.tokens)
        else:
            passes.append(answer.add_pass(position, found.num_drafts, found.tokens))
        token = found.tokens[-1]
        if on_tokens is not None:
            on_tokens(answer.ids[before:], len(found.tokens) - 1)
    seconds = time.perf_counter() - prompted
    return Decoded(answer.ids, answer.finish, passes, seconds, prompted - started, session.replayed_tokens)


def greedy_decode(
    target: TargetModel, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int] = ()
) -> Decoded:
    """Answers one prompt token by token, without a drafter. Arguments and errors as `decode_prompt`."""
    return plain_decode(target, prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids, choice=Greedy())


@inference
def plain_decode(
    target: TargetModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    choice: TokenChooser,
    on_tokens: OnTokens | None = None,
) -> Decoded:
    """Answers one prompt token by token with any choice of tokens."""
    limits = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids, "on_tokens": on_tokens}
    return decode_prompt(target, prompt_ids, Plain(choice), choice, **limits)


@torch.no_grad()
def draft_logits(target: TargetModel, drafts: DraftSession, token: int, position: int) -> Tensor:
    """The drafter's logits for the tokens after an anchor.

    Args:
        target: gives embedding and head.
        drafts: the drafter's session, which holds the tokens before `position`.
        token: the anchor.
        position: of the anchor.

    Returns:
        [M, V]; M is the block's number of drafts, or fewer at the end of the target's positions.
    """
    spec = drafts.spec
    slots = torch.full((spec.block_size,), spec.mask_token_id, device=target.device)
    slots[0] = token
    hidden = drafts.draft(target.embedding[slots].to(target.dtype), position)
    first = spec.first_draft_slot
    return head_logits(target, hidden)[first : first + num_drafts(target, spec, position)]


def head_logits(target: TargetModel, hidden: Tensor) -> Tensor:
    """Logits [..., K, V] of all slots [..., K, H], used or not: 15 rows cost a CPU twice as much as 16."""
    return F.linear(hidden, target.head.to(hidden.dtype))


def num_drafts(target: TargetModel, spec: DrafterSpec, position: int) -> int:
    """Drafts of a block at a position: all, or as many as the target's positions leave."""
    limit = target.facts.max_position_embeddings
    return spec.num_drafts if limit is None else max(0, min(spec.num_drafts, limit - position - 1))
