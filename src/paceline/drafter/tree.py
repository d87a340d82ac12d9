"""Streaks of draft trees, exactly and in batches [DDTree, arXiv 2604.12989].

The tree with node budget N is the N most probable prefixes under the product of the per-slot distributions (the root,
which is the anchor, is not counted). So no tree is built: per depth, the N best prefixes follow from the N best of the
depth before and the N best tokens, where only rank pairs (i, j) with (i + 1)·(j + 1) ≤ N can be among them; and the
target's prefix of depth d is in the tree iff it is among the N best of all depths.

Equal prefixes are ordered as `paceline.decode.draft_tree` orders them: the shorter one first, then the one whose parent
comes first, then the lower token. With logits in bfloat16 many are equal, and the tree has room for some of them only.

Shape letters: A blocks, J drafts, V vocabulary, N largest node budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeStreaks:
    """By node budget, in the order asked for.

    Attributes:
        streaks: depth of the target's path inside the tree, [budgets, A]; 0 when the first draft is not in it.
        surrogates: depth that the drafter itself expects, the sum of the node probabilities, [budgets, A].
    """

    streaks: Tensor
    surrogates: Tensor


def tree_streaks(top: Tensor, ranks: Tensor, live: Tensor, budgets: Sequence[int]) -> TreeStreaks:
    """Tree streaks of blocks.

    Args:
        top: log-probabilities of the likeliest tokens per draft, descending, [A, J, R]; R ≥ min(max(budgets), V).
        ranks: how many tokens come before the label per draft, int64 [A, J]; of equal ones the lower token does.
        live: whether a draft is supervised, bool [A, J]; a draft that is not ends the block.
        budgets: node budgets.
    """
    largest = max(budgets)
    best, place = top[:, 0, :largest], ranks[:, 0]
    levels, places, offset = [best], [_within(place, best.shape[1], 0)], best.shape[1]
    for depth in range(1, top.shape[1]):
        first, second = _rank_pairs(largest, best.shape[1], min(top.shape[2], largest), top.device)
        own = (first == place[:, None]) & (second == ranks[:, depth, None])  # the pair that is the label's prefix
        # Pairs ascend by prefix, then token: a stable sort leaves equal ones in their order.
        best, order = (best[:, first] + top[:, depth][:, second]).sort(dim=1, descending=True, stable=True)
        best, own = best[:, :largest], own.gather(1, order[:, :largest])
        place = torch.where(own.any(1), own.int().argmax(1), largest)
        levels.append(best)
        places.append(_within(place, best.shape[1], offset))
        offset += best.shape[1]
    ranked, order = torch.cat(levels, dim=1).sort(dim=1, descending=True, stable=True)
    streaks, surrogates = [], []
    for budget in budgets:
        inside = [(order[:, :budget] == place[:, None]).any(1) for place in places]
        found = torch.cumprod((torch.stack(inside, dim=1) & live).to(top.dtype), dim=1).sum(1)
        streaks.append(found)
        surrogates.append(ranked[:, :budget].exp().sum(1, dtype=torch.float64).to(top.dtype))
    return TreeStreaks(torch.stack(streaks), torch.stack(surrogates))


def _within(place: Tensor, width: int, offset: int) -> Tensor:
    """Places among all levels of places in one of them; -1 beyond its end."""
    return torch.where(place < width, place + offset, -1)


@cache
def _rank_pairs(budget: int, prefixes: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rank pairs (prefix, token) of which at most `budget` pairs are better or equal."""
    pairs = [(i, j) for i in range(prefixes) for j in range(min(tokens, budget // (i + 1)))]
    table = torch.tensor(pairs, dtype=torch.long, device=device)
    return table[:, 0], table[:, 1]
