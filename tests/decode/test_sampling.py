"""Sampled decoding has the target's distribution, whatever the drafter proposes."""

from __future__ import annotations

import itertools

import pytest
import torch

from paceline.decode.chain import speculative_decode
from paceline.decode.sampling import Greedy, Sampled

VOCAB = 5


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's statistic over the degrees of freedom of the classes that can occur."""
    draws = counts.sum()
    return float(((counts - draws * expected) ** 2 / (draws * expected)).sum()) / (expected.numel() - 1)


@pytest.mark.parametrize("close", [0.0, 0.7, 1.0], ids=["far drafter", "near drafter", "perfect drafter"])
def test_two_tokens_have_the_targets_joint_distribution(close):
    """Brute force over both tokens: p(a)·p(b|a) against 8,000 draws through two drafts."""
    torch.manual_seed(3)
    first = torch.randn(VOCAB) * 1.5
    second = torch.randn(VOCAB, VOCAB) * 1.5
    proposal = torch.stack([first * close + torch.randn(VOCAB) * (1 - close), torch.randn(VOCAB)])
    choice = Sampled(0.8, seed=11)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    kept = 0
    for _ in range(8000):
        drafts, chances = choice.drafts(proposal)
        rows = torch.stack([first, second[drafts[0]], torch.zeros(VOCAB)])
        accepted, after = choice.judge(drafts, chances, rows)
        kept += accepted
        tokens = [*drafts[:accepted].tolist(), after]
        if len(tokens) == 1:
            tokens.append(choice.token(second[tokens[0]]))
        counts[tokens[0], tokens[1]] += 1
    expected = torch.softmax(first.double() / 0.8, 0)[:, None] * torch.softmax(second.double() / 0.8, 1)
    # 24 degrees of freedom: 1 in 10,000 samples lies above 2.5.
    assert chi_square(counts.flatten(), expected.flatten()) < 2.5
    assert kept > 8000 * (0.2 if close < 1 else 1)


def test_a_biased_rule_would_be_noticed():
    """The statistic has power: always taking drafts gives the drafter's distribution instead."""
    torch.manual_seed(3)
    target, proposal = torch.randn(VOCAB) * 1.5, torch.randn(VOCAB)
    choice = Sampled(0.8, seed=11)
    draws = torch.stack([choice.drafts(proposal[None])[0] for _ in range(8000)])
    counts = torch.bincount(draws.flatten(), minlength=VOCAB).double()
    assert chi_square(counts, torch.softmax(target.double() / 0.8, 0)) > 20


def test_the_whole_loop_samples_from_the_target(make_pair):
    """First and second token of a real pair against the model's own probabilities."""
    size, draws, prompt = 4, 300, [3, 1]
    target, network = make_pair("qwen3", vocab_size=size, eos_token_id=2, drafter={"block_size": 3, "mask_token_id": 3})
    pairs = list(itertools.product(range(size), repeat=2))
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([[*prompt, *pair] for pair in pairs]), use_cache=False).logits
    chances = torch.softmax(logits.double() / 2.5, -1)
    expected = torch.stack([chances[row, 1, a] * chances[row, 2, b] for row, (a, b) in enumerate(pairs)])
    counts = torch.zeros(size * size, dtype=torch.float64)
    for seed in range(draws):
        choice = Sampled(2.5, seed)
        first, second = speculative_decode(target, network, prompt, max_new_tokens=2, choice=choice).ids
        counts[first * size + second] += 1
    assert chi_square(counts, expected) < 2.9  # 15 degrees of freedom: 1 in 5,000 lies above


def test_a_low_temperature_is_greedy():
    torch.manual_seed(1)
    logits = torch.randn(4, VOCAB)
    cold, greedy = Sampled(1e-4, 0), Greedy()
    assert cold.drafts(logits)[0].tolist() == greedy.drafts(logits)[0].tolist()
    drafts, chances = cold.drafts(logits[:3])
    assert cold.judge(drafts, chances, logits) == greedy.judge(drafts, None, logits)


def test_samples_are_keyed_by_their_seed(make_pair):
    target, network = make_pair("qwen3")
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, again, other = (
        speculative_decode(target, network, [5, 9], max_new_tokens=12, choice=Sampled(1.0, seed)).ids
        for seed in (1, 1, 2)
    )
    assert one == again != other
    assert torch.equal(torch.get_rng_state(), state)
