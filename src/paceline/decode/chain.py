"""Decoding: plainly, token by token, and speculatively, a chain of drafts verified by one target forward.

Both caches hold only what stands after every pass: the target's by `TargetSession.rewind`, the drafter's because only
features of tokens that stand are added.

Shape letters: K slots of a block, M drafts of a block, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.decode.compatibility import check_pair
from paceline.decode.sampling import Greedy, TokenChooser
from paceline.decode.session import TargetSession
from paceline.errors import DataError

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter
    from paceline.drafter.spec import DrafterSpec
    from paceline.target_model.model import TargetModel

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


@dataclass(frozen=True, slots=True)
class Pass:
    """One target forward that verified a block.

    Attributes:
        position: of the anchor in the sequence, prompt included.
        drafted: drafts that could have counted: up to a stop token among those that stand.
        accepted: drafts that stand, a stop token among them included.
        emitted: tokens that the pass gave: accepted drafts and the target's own next token; without that one after a
            stop token. Not cut by the length limit, which is no property of the drafter.
    """

    position: int
    drafted: int
    accepted: int
    emitted: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer.

    Attributes:
        ids: new tokens, a stop token included.
        finish: "stop", "length" (max_new_tokens) or "context" (the target's positions are used up).
        passes: verifying target forwards in order; empty for plain decoding.
        seconds: wall time without the prompt's forward.
        prompt_seconds: wall time of the prompt's forward.
        replayed_tokens: tokens that the target read twice because its state cannot be cut.
    """

    ids: list[int]
    finish: str
    passes: list[Pass] = field(default_factory=list)
    seconds: float = 0.0
    prompt_seconds: float = 0.0
    replayed_tokens: int = 0

    @property
    def accepted(self) -> list[int]:
        """Drafts that stand, per target pass."""
        return [entry.accepted for entry in self.passes]

    @property
    def tau(self) -> float:
        """Tokens per target pass; NaN without a pass."""
        return sum(entry.emitted for entry in self.passes) / len(self.passes) if self.passes else float("nan")


class Answer:
    """Collects tokens until a stop token, the length limit or the end of the target's positions.

    Attributes:
        ids: tokens so far.
        finish: why it ended; None while it goes on.
    """

    def __init__(self, prompt_length: int, target: TargetModel, max_new_tokens: int, stop_ids: Collection[int]) -> None:
        self.ids: list[int] = []
        self.finish: str | None = None
        self._stop = frozenset(stop_ids)
        room = context_room(target, prompt_length)
        self._limit = min(max_new_tokens, room)
        self._limit_name = "length" if max_new_tokens <= room else "context"

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self._limit - len(self.ids)

    def add(self, tokens: Sequence[int]) -> int:
        """Appends tokens up to a stop token and the limit.

        Returns:
            How many count for the drafter: all, or those up to and including a stop token.
        """
        counted = next((place + 1 for place, token in enumerate(tokens) if token in self._stop), len(tokens))
        for token in tokens[:counted]:
            if len(self.ids) == self._limit:
                break
            self.ids.append(token)
            if token in self._stop:
                self.finish = "stop"
        if self.finish is None and len(self.ids) >= self._limit:
            self.finish = self._limit_name
        return counted


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


def verified(position: int, num_drafts: int, accepted: int, counted: int) -> Pass:
    """What a block at a position came to: `counted` of its accepted drafts and the next token count."""
    return Pass(position, num_drafts if counted == accepted + 1 else counted, min(accepted, counted), counted)


@inference
def speculative_decode(
    target: TargetModel,
    network: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    choice: TokenChooser | None = None,
    without_features: bool = False,
    whole_blocks: bool = True,
) -> Decoded:
    """Answers one prompt with drafts.

    Args:
        target: the verifying model, with the drafter's taps.
        network: the drafter, on the target's device.
        prompt_ids: tokens of the prompt, at least one.
        max_new_tokens: longest answer, exact to the token.
        stop_ids: tokens that end an answer.
        choice: greedy where None, else e.g. `Sampled`.
        without_features: the negative control: the drafter gets zeros instead of the target's states.
        whole_blocks: drafts beyond the length limit are verified too, so that passes tell of the drafter alone; where
            False, they are left out, as a server would.

    Raises:
        DataError: an empty prompt, or one longer than the target's positions.
        DrafterError: drafter and target do not fit each other.
    """
    check_pair(target, network.spec)
    choice = choice or Greedy()
    started = time.perf_counter()
    answer = Answer(len(prompt_ids), target, max_new_tokens, stop_ids)
    session, context = TargetSession(target), network.new_cache()
    logits, features = session.read(prompt_tensor(prompt_ids, target), last_only=True)
    network.extend(context, torch.zeros_like(features) if without_features else features)
    token = choice.token(logits[-1])
    answer.add([token])
    prompted = time.perf_counter()
    passes: list[Pass] = []
    while answer.finish is None:
        position = session.length
        proposed = draft_logits(target, network, context, token, position)
        drafts, chances = choice.drafts(proposed if whole_blocks else proposed[: answer.room - 1])
        anchor = torch.tensor([token], device=target.device)
        logits, features = session.read(torch.cat([anchor, drafts]))
        accepted, after = choice.judge(drafts, chances, logits)
        stands = [*drafts[:accepted].tolist(), after]
        passes.append(verified(position, drafts.shape[0], accepted, answer.add(stands)))
        session.rewind(position + 1 + accepted)
        kept = features[: accepted + 1]
        network.extend(context, torch.zeros_like(kept) if without_features else kept)
        token = after
    return Decoded(
        ids=answer.ids,
        finish=answer.finish,
        passes=passes,
        seconds=time.perf_counter() - prompted,
        prompt_seconds=prompted - started,
        replayed_tokens=session.replayed_tokens,
    )


@torch.no_grad()
def draft_logits(target: TargetModel, network: Drafter, context: Any, token: int, position: int) -> Tensor:
    """The drafter's logits for the tokens after an anchor.

    Args:
        target: gives embedding and head.
        network: the drafter.
        context: its cache, holding the tokens before `position`.
        token: the anchor.
        position: where the anchor stands.

    Returns:
        [M, V]; M is the block's number of drafts, or fewer at the end of the target's positions.
    """
    spec = network.spec
    slots = torch.full((spec.block_size,), spec.mask_token_id, device=target.device)
    slots[0] = token
    hidden = network.draft(context, target.embedding[slots].to(target.dtype), position)
    first = spec.first_draft_slot
    return head_logits(target, hidden)[first : first + num_drafts(target, spec, position)]


def head_logits(target: TargetModel, hidden: Tensor) -> Tensor:
    """Logits [..., K, V] of all slots [..., K, H], used or not: 15 rows cost a CPU twice as much as 16."""
    return F.linear(hidden, target.head.to(hidden.dtype))


def num_drafts(target: TargetModel, spec: DrafterSpec, position: int) -> int:
    """Drafts of a block at a position: all, or as many as the target's positions leave."""
    limit = target.facts.max_position_embeddings
    return spec.num_drafts if limit is None else max(0, min(spec.num_drafts, limit - position - 1))


def greedy_decode(
    target: TargetModel, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int] = ()
) -> Decoded:
    """Answers one prompt token by token, without a drafter. Arguments and errors as `speculative_decode`."""
    return plain_decode(target, prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids, choice=Greedy())


@torch.inference_mode()
def plain_decode(
    target: TargetModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    choice: TokenChooser,
) -> Decoded:
    """Answers one prompt token by token with any choice of tokens."""
    started = time.perf_counter()
    answer = Answer(len(prompt_ids), target, max_new_tokens, stop_ids)
    session = TargetSession(target)
    logits, _ = session.read(prompt_tensor(prompt_ids, target), last_only=True)
    token = choice.token(logits[-1])
    answer.add([token])
    prompted = time.perf_counter()
    while answer.finish is None:
        logits, _ = session.read(torch.tensor([token], device=target.device), last_only=True)
        session.rewind(session.length)
        token = choice.token(logits[-1])
        answer.add([token])
    return Decoded(answer.ids, answer.finish, [], time.perf_counter() - prompted, prompted - started)


def context_room(target: TargetModel, prompt_length: int) -> int:
    """New tokens that the target's positions leave after a prompt.

    Raises:
        DataError: the prompt is empty or leaves no room.
    """
    if prompt_length < 1:
        raise DataError("prompt: holds no tokens; give at least one")
    limit = target.facts.max_position_embeddings
    if limit is None:
        return 1 << 62
    if prompt_length > limit:
        raise DataError(
            f"prompt: has {prompt_length} tokens, but {target.facts.path} has {limit} positions; shorten the prompt"
        )
    return limit - prompt_length + 1


def prompt_tensor(ids: Sequence[int], target: TargetModel) -> Tensor:
    """Token ids of a prompt on the target's device; DataError where one is outside the vocabulary."""
    bad = [token for token in ids if not 0 <= token < target.facts.vocab_size]
    if bad:
        raise DataError(
            f"prompt: token id {bad[0]} is outside the target's vocabulary of {target.facts.vocab_size}; "
            "was it made with another tokenizer?"
        )
    return torch.tensor(list(ids), dtype=torch.int64, device=target.device)
