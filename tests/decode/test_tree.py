"""Draft trees: the most probable prefixes, verified in one forward, lossless."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from paceline.decode import kv_cache
from paceline.decode.draft_tree import build_tree
from paceline.decode.loop import greedy_decode, plain_decode
from paceline.decode.sampling import Sampled
from paceline.decode.topk import Candidates
from paceline.decode.tree import tree_decode
from paceline.errors import TargetError


def reference_tree(logits, budget, *, temperature=1.0, chain=False):
    """What `build_tree` means, without shortcuts: of all children of all nodes, the most probable joins, N times."""
    rows = torch.log_softmax(logits.double() / temperature, dim=-1)
    nodes: dict[tuple[int, ...], float] = {}
    best = tuple(rows.argmax(dim=-1).tolist())
    if chain:
        for depth in range(min(len(best), budget)):
            nodes[best[: depth + 1]] = nodes.get(best[:depth], 0.0) + float(rows[depth, best[depth]])
    while len(nodes) < budget:
        children = {
            (*prefix, token): value + chance
            for prefix, value in [((), 0.0), *nodes.items()]
            if len(prefix) < len(best)
            for token, chance in enumerate(rows[len(prefix)].tolist())
            if (*prefix, token) not in nodes
        }
        if not children:
            break
        chosen = max(children, key=lambda prefix: (children[prefix], -len(prefix)))  # equal ones: first comes first
        nodes[chosen] = children[chosen]
    places = {prefix: place for place, prefix in enumerate(nodes)}
    return (
        [prefix[-1] for prefix in nodes],
        [places.get(prefix[:-1], -1) for prefix in nodes],
        [len(prefix) for prefix in nodes],
        list(nodes.values()),
    )


def test_the_worked_example():
    """Six nodes over three slots, worked by hand."""
    chances = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.9, 0.05, 0.05]])
    tree = build_tree(chances.log(), 6)
    assert tree.tokens.tolist() == [0, 0, 1, 0, 1, 0]
    # 0.6, 0.6·0.5, 0.3, 0.6·0.5·0.9, 0.6·0.4, 0.6·0.4·0.9; -1 is the anchor.
    assert tree.parents.tolist() == [-1, 0, -1, 1, 0, 4]
    assert 1 + np.exp(tree.log_chances).sum() == pytest.approx(2.926, abs=5e-4)


@pytest.mark.parametrize("seed", range(12))
def test_trees_hold_the_most_probable_prefixes(seed):
    """Brute force over all prefixes of all depths."""
    torch.manual_seed(seed)
    logits, temperature = torch.randn(4, 5) * 2, 0.5 + seed / 6
    rows = torch.log_softmax(logits.double() / temperature, -1).tolist()
    prefixes = [prefix for depth in range(1, 5) for prefix in itertools.product(range(5), repeat=depth)]
    values = {prefix: math.fsum(rows[place][token] for place, token in enumerate(prefix)) for prefix in prefixes}
    for budget in (1, 3, 10, 40):
        tree = build_tree(logits, budget, temperature=temperature)
        paths = paths_of(tree)
        assert len(set(paths)) == budget
        assert sorted(values[path] for path in paths) == pytest.approx(sorted(values.values())[-budget:], abs=1e-5)
        np.testing.assert_allclose(tree.log_chances, [values[path] for path in paths], atol=1e-5)


def paths_of(tree) -> list[tuple[int, ...]]:
    """Tokens from the root to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize(
    ("size", "budget", "temperature"), [(7, 1, 1.0), (7, 25, 0.6), (64, 40, 1.0), (700, 30, 2.5), (3001, 45, 1.0)]
)
def test_fast_trees_equal_the_reference(size, budget, temperature, chain):
    torch.manual_seed(size + budget)
    logits = torch.randn(4, size) * 2
    logits[1, -3:] = 9.0 + torch.arange(3)  # beyond the last whole chunk
    fast = build_tree(logits, budget, temperature=temperature, chain=chain)
    tokens, parents, depths, chances = reference_tree(logits, budget, temperature=temperature, chain=chain)
    assert (fast.tokens.tolist(), fast.parents.tolist(), fast.depths.tolist()) == (tokens, parents, depths)
    np.testing.assert_allclose(fast.log_chances, chances, atol=1e-5)


@pytest.mark.parametrize("kinds", [1, 2, 9, 300])
def test_equal_logits_come_by_token_and_shorter_prefixes_first(kinds):
    """As many different logits as bfloat16 leaves of near ones: every cut goes through equal prefixes."""
    random = torch.Generator().manual_seed(kinds)
    logits = torch.randn(kinds, generator=random).bfloat16()[torch.randint(kinds, (3, 900), generator=random)]
    for budget in (20, 45):
        fast = build_tree(logits, budget)
        tokens, parents, depths, _ = reference_tree(logits, budget)
        assert (fast.tokens.tolist(), fast.parents.tolist(), fast.depths.tolist()) == (tokens, parents, depths)


@pytest.mark.parametrize("size", [3, 640, 1000, 5003])
@pytest.mark.parametrize("shift", [0.0, 300.0, -300.0])
def test_tables_hold_the_most_probable_tokens(size, shift):
    torch.manual_seed(size)
    logits = torch.randn(6, size)
    logits[0, -3:] = 9.0 + torch.arange(3)  # beyond the last whole chunk
    logits[1, : size // 2] = 3.0  # equal ones, more than are found at first
    if size > 140:
        logits[2, 128:140] = 9.0 + torch.arange(12)  # many in one chunk
    logits += shift
    rows = torch.log_softmax(logits.double(), dim=-1)
    for limit in (1, 2, 40, 300):
        table = Candidates(logits, limit)
        for slot in range(6):
            while table.widen(slot):
                pass
            ids = table.ids[slot]
            assert len(set(ids)) == len(ids) == min(limit, size)
            expected = torch.topk(rows[slot], len(ids)).values.tolist()
            assert rows[slot, ids].tolist() == pytest.approx(expected, abs=1e-12)
            assert table.chances[slot] == pytest.approx(expected, abs=5e-5)


def test_a_chain_can_be_seeded():
    torch.manual_seed(0)
    logits = torch.randn(5, 9) * 0.1
    tree = build_tree(logits, 12, chain=True)
    paths = paths_of(tree)
    assert tuple(logits.argmax(-1).tolist()) in paths and len(set(paths)) == 12
    assert len(build_tree(logits, 3, chain=True).tokens) == 3
    assert len(build_tree(torch.randn(1, 4), 50).tokens) == 4


def test_nodes_see_their_ancestors_alone():
    tree = build_tree(torch.randn(3, 4), 9)
    seen, paths = tree.visible(), paths_of(tree)
    for one, other in itertools.product(range(9), repeat=2):
        assert seen[one, other] == (paths[one][: len(paths[other])] == paths[other])


FAMILIES = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8},
}


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("budget", [1, 30])
def test_tree_output_is_the_targets_own(make_pair, prompts, model_type, budget):
    target, network = make_pair(model_type, **FAMILIES[model_type])
    for prompt in prompts[1:5:3]:
        whole = greedy_decode(target, prompt, max_new_tokens=30).ids
        decoded = tree_decode(target, network, prompt, max_new_tokens=24, budget=budget)
        assert decoded.ids == whole[:24]
        stop = whole[11]
        stopped = tree_decode(target, network, prompt, max_new_tokens=24, budget=budget, stop_ids=[stop])
        assert stopped.ids == whole[: whole.index(stop) + 1]


def nearly_right(answer, first, slots):
    """Drafts with the answer's own tokens in second place: a wrong one looks a little better in every slot."""

    def logits(target, drafts, token, position):
        found = torch.zeros(slots, 97)
        for slot in range(slots):
            right = answer[position - first + 1 + slot]
            found[slot, right] = 12.0
            found[slot, (right + 7) % 97] = 12.5
        return found

    return logits


@pytest.mark.parametrize("room", [4, 256], ids=["growing", "roomy"])
@pytest.mark.parametrize("model_type", ["qwen3", "mistral", "gemma2"])
def test_trees_that_know_the_answer_accept_whole_branches(make_pair, prompts, monkeypatch, model_type, room):
    """With the right tokens somewhere in the tree, every kept branch and its cache must be right for the next pass.

    Windows are 8 tokens, answers 40.
    """
    from paceline.decode import tree as module

    monkeypatch.setattr(kv_cache, "SMALLEST", room)
    target, network = make_pair(model_type, **FAMILIES[model_type])
    prompt = prompts[4]
    whole = greedy_decode(target, prompt, max_new_tokens=60).ids

    monkeypatch.setattr(module, "draft_logits", nearly_right(whole, len(prompt), 5))
    told = []
    decoded = tree_decode(
        target, network, prompt, max_new_tokens=40, budget=62, on_tokens=lambda *call: told.append(call)
    )
    assert decoded.ids == whole[:40] and max(decoded.accepted) >= 4
    assert [token for tokens, _ in told for token in tokens] == decoded.ids
    assert [min(accepted, len(tokens)) for tokens, accepted in told] == [0, *decoded.accepted]


def test_sampled_walks_follow_the_target(make_pair, prompts):
    """One draw a token, as in plain decoding: the same seed gives the plain answer, whatever the trees."""
    target, network = make_pair("qwen3", eos_token_id=96)
    for seed, prompt in enumerate(prompts[1:5:3]):
        plain = plain_decode(target, prompt, max_new_tokens=20, choice=Sampled(0.8, seed)).ids
        for budget in (1, 30):
            ids = tree_decode(target, network, prompt, max_new_tokens=20, budget=budget, choice=Sampled(0.8, seed)).ids
            assert ids == plain


def test_recurrent_targets_decode_with_trees(make_pair, prompts):
    """Each branch has a copy of the state, and what is kept is read once more: the answer is the target's own."""
    target, network = make_pair("qwen3_5_text")
    whole = greedy_decode(target, prompts[1], max_new_tokens=5).ids
    decoded = tree_decode(target, network, prompts[1], max_new_tokens=5, budget=9)
    assert decoded.ids == whole
    assert decoded.replayed_tokens >= len(decoded.accepted)


def test_trees_on_recurrent_targets_accept_whole_branches(make_pair, prompts, monkeypatch):
    """The right tokens are never the drafter's first choice, so every kept branch is another than the first."""
    from paceline.decode import session
    from paceline.decode import tree as module

    monkeypatch.setattr(session, "MOST_PATHS", 5)
    target, network = make_pair("qwen3_next")
    prompt = prompts[4]
    whole = greedy_decode(target, prompt, max_new_tokens=20).ids

    monkeypatch.setattr(module, "draft_logits", nearly_right(whole, len(prompt), 3))
    decoded = tree_decode(target, network, prompt, max_new_tokens=12, budget=14)
    assert decoded.ids == whole[:12] and max(decoded.accepted) == 3


def test_paths_of_a_tree_hold_every_node():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(3))
    tree = build_tree(logits, 20)
    paths = tree.paths()
    assert {node for path in paths for node in path} == set(range(20))
    for path in paths:
        assert [int(tree.parents[node]) for node in path] == [-1, *path[:-1]]


def test_targets_that_cannot_are_refused(make_pair, monkeypatch):
    """A state that is not copied row by row would answer wrongly without an error."""
    from paceline.decode import kv_cache as module

    target, network = make_pair("qwen3_5_text")
    monkeypatch.setattr(module, "_repeated", lambda value, count: value)
    with pytest.raises(TargetError, match=r"several continuations at once.*decode with the chain"):
        tree_decode(target, network, [5, 9], max_new_tokens=10, budget=8)
