"""An answer while it grows, and what each target pass gave: tokens, passes, limits.

What counts, for all ways of decoding: a pass verifies one block or tree; `Pass.accepted` counts drafts that the target
confirmed, `Pass.emitted` those and the target's own next token. Only tokens of the answer count: nothing after a stop
token, nothing beyond the length limit. So Σ emitted = tokens of the answer − 1 (the first comes from the prompt), and
τ = Σ emitted / passes is what a user gets, however short the answer is cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.target_model.model import TargetModel


@dataclass(frozen=True, slots=True)
class Pass:
    """One target forward that verified a block.

    Attributes:
        position: of the anchor in the sequence, prompt included.
        drafted: drafts that could have counted: up to the end of the answer.
        accepted: drafts that the target confirmed, a stop token among them included.
        emitted: tokens that the pass added to the answer: accepted drafts and the target's own next token, without
            that one after a stop token.
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
        """Accepted drafts of each target pass."""
        return [entry.accepted for entry in self.passes]

    @property
    def tau(self) -> float:
        """Tokens per target pass; NaN without a pass."""
        return sum(entry.emitted for entry in self.passes) / len(self.passes) if self.passes else float("nan")


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The place where two answers differ first: that of a token, or the end of the shorter one."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


class Answer:
    """Collects tokens until a stop token, the length limit or the end of the target's positions.

    Attributes:
        ids: tokens so far.
        finish: why it ended; None while it grows.

    Raises:
        DataError: the prompt is empty or leaves no room.
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
        """Appends tokens up to a stop token and the limit; gives how many that were."""
        before = len(self.ids)
        for token in tokens[: self.room]:
            self.ids.append(token)
            if token in self._stop:
                self.finish = "stop"
                break
        if self.finish is None and len(self.ids) >= self._limit:
            self.finish = self._limit_name
        return len(self.ids) - before

    def add_pass(self, position: int, num_drafts: int, tokens: Sequence[int]) -> Pass:
        """Appends the tokens of a pass (accepted drafts, then the target's own) and gives the pass's record."""
        added = self.add(tokens)
        drafted = num_drafts if added == len(tokens) else added
        return Pass(position, drafted, min(len(tokens) - 1, added), added)


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
    """Token ids of a prompt, int64 [T] on the target's device.

    Raises:
        DataError: an id is outside the vocabulary.
    """
    bad = [token for token in ids if not 0 <= token < target.facts.vocab_size]
    if bad:
        raise DataError(
            f"prompt: token id {bad[0]} is outside the target's vocabulary of {target.facts.vocab_size}; "
            "was it made with another tokenizer?"
        )
    return torch.tensor(list(ids), dtype=torch.int64, device=target.device)
