"""Tree streaks against the heap of the paper and against all trees by enumeration."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
import torch

from paceline.decode.draft_tree import build_tree
from paceline.drafter.tree import tree_streaks

EXAMPLE = [[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.9, 0.05, 0.05]]


def heap_tree(chances: np.ndarray, budget: int) -> list[tuple[tuple[int, ...], float]]:
    """(prefix of tokens, probability) of the nodes: pop the best, push its next sibling and its first child."""
    order = np.argsort(-chances, axis=1, kind="stable")

    def node(ranks):
        return -float(np.prod([chances[d, order[d, r]] for d, r in enumerate(ranks)])), ranks

    heap, found = [node((0,))], []
    while heap and len(found) < budget:
        negative, ranks = heapq.heappop(heap)
        found.append((tuple(int(order[d, r]) for d, r in enumerate(ranks)), -negative))
        if ranks[-1] + 1 < chances.shape[1]:
            heapq.heappush(heap, node((*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < len(chances):
            heapq.heappush(heap, node((*ranks, 0)))
    return found


def batched(chances, labels, live, budgets):
    logs = torch.tensor(chances).log()
    top = logs.sort(dim=2, descending=True, stable=True)
    ranks = (top.indices == torch.tensor(labels)[..., None]).int().argmax(2)
    return tree_streaks(top.values, ranks, torch.tensor(live), budgets)


def test_the_example():
    tree = heap_tree(np.array(EXAMPLE), 6)
    assert [prefix for prefix, _ in tree] == [(0,), (0, 0), (1,), (0, 0, 0), (0, 1), (0, 1, 0)]
    assert 1 + sum(chance for _, chance in tree) == pytest.approx(2.926)
    found = batched([EXAMPLE], [[0, 1, 0]], [[True] * 3], [6])
    assert 1 + found.surrogates[0, 0] == pytest.approx(2.926)
    assert found.streaks[0, 0] == 3
    assert batched([EXAMPLE], [[1, 1, 0]], [[True] * 3], [6]).streaks[0, 0] == 1


def test_trees_equal_enumeration_and_heap():
    random = np.random.default_rng(0)
    for _ in range(120):
        depth, vocabulary = int(random.integers(1, 5)), int(random.integers(2, 5))
        chances = random.dirichlet(np.full(vocabulary, 0.6), (1, depth)) + 1e-6
        chances /= chances.sum(2, keepdims=True)
        labels, live = (
            random.integers(0, vocabulary, (1, depth)),
            np.arange(depth)[None] < random.integers(0, depth + 1),
        )
        budgets = sorted(random.choice(np.arange(1, 30), 3, replace=False).tolist())
        prefixes = [p for d in range(1, depth + 1) for p in itertools.product(range(vocabulary), repeat=d)]
        value = {p: float(np.prod([chances[0, i, t] for i, t in enumerate(p)])) for p in prefixes}
        best = sorted(prefixes, key=lambda p: -value[p])
        found = batched(chances, labels, live, budgets)
        for row, budget in enumerate(budgets):
            tree = set(best[:budget])
            path = tuple(int(t) for t in labels[0])
            streak = 0
            while streak < depth and live[0, streak] and path[: streak + 1] in tree:
                streak += 1
            assert {p for p, _ in heap_tree(chances[0], budget)} == tree
            assert found.streaks[row, 0] == streak
            assert found.surrogates[row, 0] == pytest.approx(sum(value[p] for p in tree), rel=1e-9)


def test_budget_many_tokens_are_enough():
    """The likeliest N tokens of a slot suffice for a budget of N."""
    random = np.random.default_rng(1)
    logs = torch.log_softmax(torch.from_numpy(random.normal(0, 2, (20, 6, 300))), dim=2)
    labels = torch.from_numpy(random.integers(0, 4, (20, 6)))
    order = logs.sort(dim=2, descending=True)
    live = torch.ones(20, 6, dtype=torch.bool)
    whole, short = (tree_streaks(order.values[..., :n], labels, live, [16, 64]) for n in (300, 64))
    assert torch.equal(whole.streaks, short.streaks)
    torch.testing.assert_close(whole.surrogates, short.surrogates)
    assert (whole.streaks[1] >= whole.streaks[0]).all() and whole.streaks.max() > 1


@pytest.mark.parametrize("kinds", [2, 9, 60])
def test_equal_prefixes_count_as_the_built_tree_has_them(kinds):
    """Few different logits, as bfloat16 leaves of near ones: most cuts go through equal prefixes."""
    random = torch.Generator().manual_seed(kinds)
    logits = torch.randn(kinds, generator=random)[torch.randint(kinds, (40, 3, 80), generator=random)].double()
    labels = torch.randint(12, (40, 3), generator=random)
    chances, budgets = torch.log_softmax(logits, dim=2), [4, 16, 40]
    found = batched(chances.exp().numpy(), labels.tolist(), [[True] * 3] * 40, budgets)
    for row, budget in enumerate(budgets):
        for block in range(40):
            tree = build_tree(logits[block].float(), budget)
            paths = {-1: ()}
            for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
                paths[node] = (*paths[parent], token)
            label = tuple(labels[block].tolist())
            streak = next((d for d in range(3) if label[: d + 1] not in paths.values()), 3)
            assert found.streaks[row, block] == streak


def test_a_sure_first_slot_before_an_unsure_second_one():
    """Nearly all of the N best prefixes begin with the first token: ranks of the second slot must reach up to N."""
    first = np.array([0.99, 0.004, 0.003, *[0.003 / 37] * 37])
    second = np.full(40, 0.025) - np.arange(40) * 1e-4
    chances = np.stack([first / first.sum(), second / second.sum(), second[::-1] / second.sum()])[None]
    for label in (0, 7, 13, 14, 15):
        tree = {prefix for prefix, _ in heap_tree(chances[0], 16)}
        found = batched(chances, [[0, label, 39]], [[True] * 3], [16])
        assert found.streaks[0, 0] == 1 + ((0, label) in tree)
        expected = sum(chance for _, chance in heap_tree(chances[0], 16))
        assert found.surrogates[0, 0] == pytest.approx(expected, rel=1e-9)
