"""What an evaluation found, as plain values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from paceline.evaluate.memory import Memory
from paceline.evaluate.metrics import GroupTau, Lossless, SlotRate


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of the report.

    ``accepted`` lists accepted drafts per target pass; ``pieces`` is the answer's text token by token (the ids in words
    where nobody decoded them): the target's own first token, then each pass's accepted drafts and its own token.
    """

    id: str
    tags: list[str]
    prompt_tokens: int
    new_tokens: int
    finish: str
    tau: float | None
    accepted: list[int]
    pieces: list[str]


@dataclass(frozen=True, slots=True)
class TreeFigures:
    """What decoding the same prompts with draft trees found; names as in `EvaluationReport`.

    Attributes:
        budget, chain_seed, temperature: of the trees.
        below_chain: whether they came to fewer tokens per target pass than the chain.
    """

    budget: int
    chain_seed: bool
    temperature: float
    passes: int
    new_tokens: int
    tau_micro: float
    tau_macro: float
    below_chain: bool
    histogram: list[int]
    by_tag: dict[str, GroupTau]
    by_context: dict[str, GroupTau]
    lossless: Lossless | None
    seconds_per_token: float | None


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Everything that an evaluation found; `to_json` gives plain values.

    Attributes:
        num_prompts, passes, new_tokens: how much was decoded.
        tau_micro, tau_macro: tokens of the answers per target pass, over passes and over prompts (see `answers.Pass`).
        histogram: passes by accepted length, from 0.
        slots: acceptance per draft slot.
        by_tag, by_context: τ of groups of passes.
        lossless: comparison with plain greedy decoding; None when not asked for, or where answers are sampled.
        training_tau: τ of the training forward on the same blocks; None when not asked for, or where drafts are drawn.
        training_agrees: whether it is within 2 % of the decode loop's.
        control_tau: τ of a few prompts without features; near 1 for a drafter that reads its context.
        control_suspicious: whether that τ is so high that the evaluation or the drafter must be doubted.
        seconds_per_token, plain_seconds_per_token: wall time, prompts' forward left out; the second is None with
            several prompts at once, since plain decoding takes them one by one.
        dtype: compute type.
        temperature: at which answers are sampled; 0 is greedy.
        tree_tau: `tau_micro` with draft trees; None without.
        tree: the rest of what was found with them.
        rows: the prompts.
        set_aside: one line about each prompt that is longer than the target's positions.
        memory: bytes that decoding holds and moves.
    """

    num_prompts: int
    passes: int
    new_tokens: int
    tau_micro: float
    tau_macro: float
    histogram: list[int]
    slots: list[SlotRate]
    by_tag: dict[str, GroupTau]
    by_context: dict[str, GroupTau]
    lossless: Lossless | None
    training_tau: float | None
    training_agrees: bool | None
    control_tau: float | None
    control_suspicious: bool | None
    seconds_per_token: float | None
    plain_seconds_per_token: float | None
    dtype: str
    temperature: float
    tree_tau: float | None
    tree: TreeFigures | None
    rows: list[PromptRow]
    set_aside: list[str]
    memory: Memory

    @property
    def errors(self) -> int:
        """Answers, with the chain and with trees, that differ from the target's own by more than rounding."""
        found = (self.lossless, self.tree.lossless if self.tree is not None else None)
        return sum(entry.errors for entry in found if entry is not None)

    def to_json(self) -> dict[str, Any]:
        """Nested plain values."""
        return dataclasses.asdict(self)
