"""Speculative decoding of several prompts at once: their blocks are drafted, and verified, in one forward each.

A prompt that ends makes room for the next one. What a prompt answers does not depend on the others: rows see neither
each other nor what rejected drafts of any row have left, and stop tokens and limits count for each alone.

Shape letters: A sequences, K slots of a block, M drafts of a block, G key heads, E head size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.decode.answers import Answer, Decoded, Pass, prompt_tensor
from paceline.decode.batch_session import BatchSession, SeparateRows, open_batch
from paceline.decode.compatibility import check_pair
from paceline.decode.kv_cache import enlarged
from paceline.decode.loop import head_logits, inference, num_drafts
from paceline.decode.sampling import Greedy, TokenChooser
from paceline.decode.session import TargetSession

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter
    from paceline.target_model.model import TargetModel

ROOM = 256
"""Context columns of a sequence at first."""


class BatchContext:
    """Keys and values of several sequences' contexts, per draft layer, [G, A, room, E]."""

    def __init__(self, network: Drafter) -> None:
        self._network = network
        self._store: list[tuple[Tensor, Tensor]] = []
        self.room = 0

    def add(self, features: Tensor) -> None:
        """One more sequence with the features of its first tokens, [T, N·H]."""
        count = features.shape[0]
        parts = self._network.context_parts(features, torch.arange(count, device=features.device))
        self._grow(max(count, ROOM))
        new = [tuple(enlarged(part[:, None], self.room) for part in pair) for pair in parts]
        old = self._store or [(keys[:, :0], values[:, :0]) for keys, values in new]
        self._store = [
            (torch.cat([a, keys], dim=1), torch.cat([b, values], dim=1))
            for (a, b), (keys, values) in zip(old, new, strict=True)
        ]

    def extend(self, features: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Features [T, N·H] of the next tokens of sequences `rows` at `positions`, int64 [T] each."""
        self._grow(int(positions.max()) + 1)
        parts = self._network.context_parts(features, positions)
        for stored, new in zip(self._store, parts, strict=True):
            for room, values in zip(stored, new, strict=True):
                room[:, rows, positions] = values

    def select(self, rows: Sequence[int]) -> None:
        """Keeps some sequences, in this order."""
        self._store = [(keys[:, list(rows)], values[:, list(rows)]) for keys, values in self._store]

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [G, A·room, E] of every draft layer."""
        return [(keys.flatten(1, 2), values.flatten(1, 2)) for keys, values in self._store]

    def _grow(self, needed: int) -> None:
        if needed > self.room:
            self.room = max(needed, 2 * self.room)
            self._store = [(enlarged(keys, self.room), enlarged(values, self.room)) for keys, values in self._store]


@dataclass(slots=True)
class _PromptRow:
    """A prompt that is being answered."""

    place: int
    answer: Answer
    choice: TokenChooser
    token: int
    prompt_seconds: float
    seconds: float = 0.0
    passes: list[Pass] = field(default_factory=list)

    def decoded(self) -> Decoded:
        assert self.answer.finish is not None
        return Decoded(self.answer.ids, self.answer.finish, self.passes, self.seconds, self.prompt_seconds)


@inference
def batch_decode(
    target: TargetModel,
    network: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    choices: Sequence[TokenChooser] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Decoded]:
    """Answers prompts with drafts, several at a time.

    Args:
        target: the verifying model.
        network: the drafter.
        prompts: tokens of each prompt.
        batch_size: prompts at a time.
        max_new_tokens: longest answer, exact to the token.
        stop_ids: tokens that end an answer.
        choices: one a prompt; greedy where None.
        progress: called with the number of answers that are done.

    Returns:
        An answer for each prompt, in order; its seconds are its share of those of the passes.

    Raises:
        TargetError: the target takes no masks.
        DataError, DrafterError: as `speculative_decode`.
    """
    check_pair(target, network.spec)
    session, context = open_batch(target), BatchContext(network)
    done: dict[int, Decoded] = {}
    rows: list[_PromptRow] = []
    waiting = list(range(len(prompts)))[::-1]
    while waiting or rows:
        while waiting and len(rows) < batch_size:
            place = waiting.pop()
            choice = choices[place] if choices is not None else Greedy()
            answer = Answer(len(prompts[place]), target, max_new_tokens, stop_ids)
            row, alone, features = _begin(target, place, prompts[place], answer, choice)
            if answer.finish is None:
                session.add(alone)
                context.add(features)
                rows.append(row)
            else:
                done[place] = row.decoded()
        started = time.perf_counter()
        _pass(target, network, session, context, rows)
        for row in rows:
            row.seconds += (time.perf_counter() - started) / len(rows)
        left = [number for number, row in enumerate(rows) if row.answer.finish is None]
        if len(left) < len(rows):
            done |= {row.place: row.decoded() for row in rows if row.answer.finish is not None}
            session.select(left)
            context.select(left)
            rows = [rows[number] for number in left]
            if progress is not None:
                progress(len(done))
    return [done[place] for place in range(len(prompts))]


def _begin(
    target: TargetModel, place: int, prompt_ids: Sequence[int], answer: Answer, choice: TokenChooser
) -> tuple[_PromptRow, TargetSession, Tensor]:
    """Reads one prompt alone, as decoding it alone would, and chooses its first token."""
    started = time.perf_counter()
    session = TargetSession(target, forgets=False)
    logits, features = session.read(prompt_tensor(prompt_ids, target), last_only=True)
    token = choice.token(logits[-1])
    answer.add([token])
    return _PromptRow(place, answer, choice, token, time.perf_counter() - started), session, features


def _pass(
    target: TargetModel,
    network: Drafter,
    session: BatchSession | SeparateRows,
    context: BatchContext,
    rows: list[_PromptRow],
) -> None:
    """Drafts and verifies one block of every row."""
    if not rows:
        return
    starts = list(session.lengths)
    proposals = _drafts(target, network, context, rows, starts)
    counts = [1 + len(drafts) for drafts, _ in proposals]
    ids = torch.zeros(len(rows), max(counts), dtype=torch.int64, device=target.device)
    for number, (row, (drafts, _)) in enumerate(zip(rows, proposals, strict=True)):
        ids[number, 0] = row.token
        ids[number, 1 : counts[number]] = drafts
    logits, features = session.read(ids, counts)
    kept_rows: list[int] = []
    kept: list[int] = []
    ends: list[int] = []
    for number, (row, (drafts, chances)) in enumerate(zip(rows, proposals, strict=True)):
        accepted, after = row.choice.judge(drafts, chances, logits[number, : counts[number]])
        tokens = [*drafts[:accepted].tolist(), after]
        row.passes.append(row.answer.add_pass(starts[number], drafts.shape[0], tokens))
        row.token = after
        kept_rows += [number] * (accepted + 1)
        kept += range(accepted + 1)
        ends.append(starts[number] + accepted + 1)
    number, step = torch.tensor([kept_rows, kept], device=target.device)
    context.extend(features[number, step], number, torch.tensor(starts, device=target.device)[number] + step)
    session.rewind(ends)


@torch.no_grad()
def _drafts(
    target: TargetModel, network: Drafter, context: BatchContext, rows: Sequence[_PromptRow], starts: Sequence[int]
) -> list[tuple[Tensor, Any]]:
    """Drafts of each row, and what judging them needs."""
    spec = network.spec
    slots = torch.full((len(rows), spec.block_size), spec.mask_token_id, device=target.device)
    slots[:, 0] = torch.tensor([row.token for row in rows], device=target.device)
    embedded = target.embedding[slots].to(target.dtype)
    hidden = network.draft_blocks(context.layers(), context.room, starts, embedded)
    counts = [min(num_drafts(target, spec, at), row.answer.room - 1) for row, at in zip(rows, starts, strict=True)]
    first = spec.first_draft_slot
    logits = head_logits(target, hidden)[:, first:]
    return [row.choice.drafts(logits[number, : counts[number]]) for number, row in enumerate(rows)]
