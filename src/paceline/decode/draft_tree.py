"""A DDTree: the most probable prefixes under the product of a block's per-slot distributions [arXiv 2604.12989].

A heap pops the best prefix and pushes its next sibling and its first child; `candidates` gives each slot's tokens by
falling probability, as many as are asked for.

Shape letters: M drafts, V vocabulary, N nodes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from paceline.decode.topk import Candidates


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in the order in which they were chosen; a parent comes before its children.

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

    def visible(self) -> np.ndarray:
        """Which nodes a node sees: itself and its ancestors, bool [N, N]."""
        count = len(self.tokens)
        seen = np.eye(count, count + 1, dtype=bool)
        nodes, ancestors = np.arange(count), self.parents
        for _ in range(int(self.depths.max(initial=1)) - 1):
            seen[nodes, ancestors] = True  # -1, above the first nodes, is the last column
            ancestors = np.where(ancestors < 0, -1, self.parents[ancestors])
        return seen[:, :count]

    def paths(self) -> list[list[int]]:
        """Nodes from a child of the anchor to a leaf, one list a leaf; all nodes are in one."""
        inner = set(self.parents.tolist())
        found = []
        for leaf in range(len(self.tokens)):
            if leaf in inner:
                continue
            path = [leaf]
            while (parent := int(self.parents[path[-1]])) >= 0:
                path.append(parent)
            found.append(path[::-1])
        return found


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
    if not logits.shape[0]:
        return _finish([], [], [], [])
    return _grow(Candidates(logits, budget, temperature), budget, chain)


def _grow(table: Candidates, budget: int, chain: bool) -> DraftTree:
    """Best-first growth over per-slot tables sorted by falling log-probability, widened where their end is reached."""
    chances, ids = table.chances, table.ids
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    found: list[float] = []

    def add(parent: int, depth: int, rank: int, value: float) -> int:
        tokens.append(ids[depth][rank])
        parents.append(parent)
        depths.append(depth + 1)
        found.append(value)
        return len(tokens) - 1

    # Entries: (-log-probability, depth, parent, rank, log-probability of the parent). Of equal prefixes the shorter one
    # comes first, then the one whose parent does, then the lower token: `paceline.drafter.tree` counts them so as well.
    heap: list[tuple[float, int, int, int, float]] = []

    def push(parent: int, depth: int, rank: int, base: float) -> None:
        """Offers a child of a node, if its slot has a token of that rank."""
        if depth == len(chances):
            return
        while rank >= len(chances[depth]):
            if not table.widen(depth):
                return
        heapq.heappush(heap, (-(base + chances[depth][rank]), depth, parent, rank, base))

    if chain:
        parent, base = -1, 0.0
        for depth in range(min(len(chances), budget)):
            push(parent, depth, 1, base)
            base += chances[depth][0]
            parent = add(parent, depth, 0, base)
    else:
        push(-1, 0, 0, 0.0)
    while heap and len(tokens) < budget:
        negative, depth, parent, rank, base = heapq.heappop(heap)
        node = add(parent, depth, rank, -negative)
        push(parent, depth, rank + 1, base)
        push(node, depth + 1, 0, -negative)
    return _finish(tokens, parents, depths, found)


def _finish(tokens: list[int], parents: list[int], depths: list[int], found: list[float]) -> DraftTree:
    return DraftTree(
        np.array(tokens, np.int64), np.array(parents, np.int64), np.array(depths, np.int64), np.array(found, np.float64)
    )
