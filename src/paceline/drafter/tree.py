"""Streaks of draft trees, exactly and in batches [DDTree, arXiv 2604.12989].

The tree with node budget N is the N most probable prefixes under the product of the per-slot distributions (the root,
which is the anchor, is not counted). The target's prefix of depth d is in it iff its log-probability is at least that
of the N-th best prefix. So no tree is built: per depth, the N best prefixes follow from the N best of the depth
before and the N best tokens, where only rank pairs (i, j) with (i + 1)·(j + 1) ≤ N can be among them.

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


def tree_streaks(top: Tensor, own: Tensor, live: Tensor, budgets: Sequence[int]) -> TreeStreaks:
    """Tree streaks of blocks.

    Args:
        top: log-probabilities of the likeliest tokens per draft, descending, [A, J, R]; R ≥ min(max(budgets), V).
        own: log-probability of the label per draft, [A, J].
        live: whether a draft is supervised, bool [A, J]; a draft that is not ends the block.
        budgets: node budgets.
    """
    largest = max(budgets)
    best = top[:, 0, :largest]
    levels, paths = [best], [own[:, 0].double()]
    for depth in range(1, top.shape[1]):
        first, second = _rank_pairs(largest, best.shape[1], min(top.shape[2], largest), top.device)
        candidates = best[:, first] + top[:, depth][:, second]
        best = candidates.topk(min(largest, candidates.shape[1]), dim=1).values
        levels.append(best)
        # Added depth by depth: a float cumsum is not deterministic on CUDA.
        paths.append(paths[-1] + own[:, depth].double())
    everyone, path = torch.cat(levels, dim=1), torch.stack(paths, dim=1).to(own.dtype)
    ranked = everyone.topk(min(largest, everyone.shape[1]), dim=1).values
    streaks, surrogates = [], []
    for budget in budgets:
        last = min(budget, ranked.shape[1]) - 1
        # Sums in another order differ in the last bits: the label's prefix may be the N-th best one itself.
        threshold = ranked[:, last : last + 1] - 1e-5 * ranked[:, last : last + 1].abs()
        inside = (path >= threshold) & live
        streaks.append(torch.cumprod(inside.to(own.dtype), dim=1).sum(1))
        surrogates.append(ranked[:, : last + 1].exp().sum(1, dtype=torch.float64).to(own.dtype))
    return TreeStreaks(torch.stack(streaks), torch.stack(surrogates))


@cache
def _rank_pairs(budget: int, prefixes: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rank pairs (prefix, token) of which at most `budget` pairs are better or equal."""
    pairs = [(i, j) for i in range(prefixes) for j in range(min(tokens, budget // (i + 1)))]
    table = torch.tensor(pairs, dtype=torch.long, device=device)
    return table[:, 0], table[:, 1]
