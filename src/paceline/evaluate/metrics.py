"""What passes of the decode loop say about a drafter. No torch.

τ is the mean number of tokens per target pass, the target's own token included. Micro weighs passes equally, macro
prompts. Accepted lengths leave that token out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.decode.answers import Pass

CONTEXT_EDGES = (256, 1024, 4096, 16384, 65536)
"""Upper ends, in tokens, of the classes of context length; the last class is open."""


@dataclass(frozen=True, slots=True)
class SlotRate:
    """Acceptance of one draft slot, given that all earlier drafts of its block stand.

    Attributes:
        slot: 1 = first draft.
        reached: blocks whose earlier drafts all stand and that drafted this far.
        accepted: of these, blocks in which this draft is kept.
        conditional: accepted / reached; None where nothing was reached.
        cumulative: blocks in which this draft is kept / all blocks.
    """

    slot: int
    reached: int
    accepted: int
    conditional: float | None
    cumulative: float


@dataclass(frozen=True, slots=True)
class GroupTau:
    """τ of a group of passes.

    Attributes:
        passes: how many.
        tokens: that they emitted.
        tau: tokens / passes.
    """

    passes: int
    tokens: int
    tau: float


@dataclass(frozen=True, slots=True)
class Lossless:
    """Greedy output against the target's own greedy output.

    Attributes:
        prompts: how many were compared.
        equal: prompts whose answers are token for token the same.
        errors: prompts that differ by more than rounding explains.
        margin: logit gap that rounding explains in any type but float64, where it is 0.
        differences: per differing prompt its id, the first differing place in the answer, both tokens, how far apart
            their logits are in one forward over the common prefix, and how far rounding in this type may set them.
    """

    prompts: int = 0
    equal: int = 0
    errors: int = 0
    margin: float = 0.0
    differences: list[dict[str, str | int | float | bool]] = field(default_factory=list)


def group(passes: Iterable[Pass]) -> GroupTau:
    """τ of some passes; NaN of none is given as 0 passes and τ 0."""
    entries = list(passes)
    tokens = sum(entry.emitted for entry in entries)
    return GroupTau(len(entries), tokens, tokens / len(entries) if entries else 0.0)


def macro_tau(answers: Sequence[Sequence[Pass]]) -> float:
    """Mean over prompts of their own τ; prompts that needed no pass are left out. 0 where none is left."""
    own = [group(passes).tau for passes in answers if passes]
    return math.fsum(own) / len(own) if own else 0.0


def histogram(passes: Iterable[Pass], num_drafts: int) -> list[int]:
    """Passes by accepted length, 0 to ``num_drafts``."""
    counts = [0] * (num_drafts + 1)
    for entry in passes:
        counts[entry.accepted] += 1
    return counts


def slot_rates(passes: Sequence[Pass], num_drafts: int) -> list[SlotRate]:
    """Acceptance per draft slot; blocks cut short by a stop token or the context's end count up to there."""
    rates = []
    for slot in range(1, num_drafts + 1):
        reached = sum(entry.accepted >= slot - 1 and entry.drafted >= slot for entry in passes)
        accepted = sum(entry.accepted >= slot for entry in passes)
        conditional = accepted / reached if reached else None
        rates.append(SlotRate(slot, reached, accepted, conditional, accepted / len(passes) if passes else 0.0))
    return rates


def by_context(passes: Iterable[Pass]) -> dict[str, GroupTau]:
    """τ by tokens before the block, for the classes that occur, shortest first."""
    entries = list(passes)
    found = {}
    for low, high in zip((0, *CONTEXT_EDGES), (*CONTEXT_EDGES, 1 << 62), strict=True):
        inside = [entry for entry in entries if low <= entry.position < high]
        if inside:
            found[f"{low}-{high - 1}" if high < 1 << 62 else f"{low}+"] = group(inside)
    return found
