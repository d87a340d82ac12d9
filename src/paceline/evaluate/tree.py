"""A DDTree: the most probable prefixes under the product of a block's per-slot distributions [arXiv 2604.12989].

Only the N most probable tokens of a slot can be among the N most probable prefixes, so the vocabulary is reduced to
those once, on whatever device it lies; then a heap pops the best prefix and pushes its next sibling and first child.

Shape letters: M drafts, V vocabulary, N nodes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in the order in which they were chosen; a parent stands before its children.

    Attributes:
        tokens: int64 [N].
        parents: number of each node's parent, -1 for children of the anchor, int64 [N].
        depths: 1 for children of the anchor, int64 [N].
        log_chances: log of each prefix's probability, float64 [N], falling.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    log_chances: np.ndarray

    @property
    def expected_tokens(self) -> float:
        """Tokens per target pass that the drafter itself expects: 1 + Σ of the nodes' probabilities."""
        return 1.0 + float(np.exp(self.log_chances).sum())

    def visible(self) -> np.ndarray:
        """Which nodes a node sees: itself and its ancestors, bool [N, N]."""
        seen = np.eye(len(self.tokens), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen


def build_tree(logits: Tensor, budget: int, *, temperature: float = 1.0, chain: bool = False) -> DraftTree:
    """The tree of the most probable prefixes.

    Args:
        logits: the drafter's, [M, V].
        budget: N, the largest number of nodes.
        temperature: the drafter's distributions are sharpened (below 1) or flattened (above 1) by it.
        chain: start with the most probable token of every slot, so that the tree never does worse than the chain.

    Returns:
        At most N nodes; fewer where there are not as many prefixes.
    """
    width = min(budget, logits.shape[1])
    top, ids = most_probable(logits.float(), width)
    scaled = top / temperature
    norm = torch.logsumexp(logits.float() / temperature, dim=-1, keepdim=True)
    return _grow((scaled - norm).double().tolist(), ids.tolist(), budget, chain)


CHUNK = 64
"""Tokens that are represented by their largest logit while the most probable ones are sought."""


def most_probable(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """As ``torch.topk`` over the last of two dimensions, for few of many.

    The N largest numbers lie in the N chunks of the largest maxima, so that only these are searched.

    Returns:
        Values and ids, [M, width], falling.
    """
    rows, size = logits.shape
    whole = size // CHUNK * CHUNK
    if whole <= 4 * CHUNK * width:
        return torch.topk(logits, width, dim=-1)
    chunks = logits[:, :whole].view(rows, -1, CHUNK)
    best = torch.topk(chunks.amax(dim=-1), width, dim=-1).indices
    places = (best[:, :, None] * CHUNK + torch.arange(CHUNK, device=logits.device)).view(rows, -1)
    rest = torch.arange(whole, size, device=logits.device).expand(rows, -1)
    places = torch.cat([places, rest], dim=-1)
    top, found = torch.topk(logits.gather(1, places), width, dim=-1)
    return top, places.gather(1, found)


def _grow(chances: list[list[float]], ids: list[list[int]], budget: int, chain: bool) -> DraftTree:
    """Best-first growth over per-slot tables sorted by falling log-probability."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    found: list[float] = []
    depth_limit, width = len(chances), len(chances[0]) if chances else 0

    def add(parent: int, depth: int, rank: int, value: float) -> int:
        tokens.append(ids[depth][rank])
        parents.append(parent)
        depths.append(depth + 1)
        found.append(value)
        return len(tokens) - 1

    # Entries: (-log-probability, order, parent, depth, rank, log-probability of the parent).
    heap: list[tuple[float, int, int, int, int, float]] = []
    order = 0

    def push(parent: int, depth: int, rank: int, base: float) -> None:
        nonlocal order
        if depth < depth_limit and rank < width:
            heapq.heappush(heap, (-(base + chances[depth][rank]), order, parent, depth, rank, base))
            order += 1

    if chain:
        parent, base = -1, 0.0
        for depth in range(min(depth_limit, budget)):
            push(parent, depth, 1, base)
            base += chances[depth][0]
            parent = add(parent, depth, 0, base)
    else:
        push(-1, 0, 0, 0.0)
    while heap and len(tokens) < budget:
        negative, _, parent, depth, rank, base = heapq.heappop(heap)
        node = add(parent, depth, rank, -negative)
        push(parent, depth, rank + 1, base)
        push(node, depth + 1, 0, -negative)
    return DraftTree(
        np.array(tokens, np.int64), np.array(parents, np.int64), np.array(depths, np.int64), np.array(found)
    )
