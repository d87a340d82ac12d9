"""Batched generation: padding changes nothing; sampling follows the right distribution, keyed by the prompt."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from paceline.decode.generate import KeyedGumbel, TargetGenerator, answer_seed, keep_likely
from paceline.errors import TargetError
from paceline.types import Sampling

VOCAB = 40
STOP = 7


def small_model(seed: int = 1) -> Qwen3ForCausalLM:
    """A random model in float64, with weights large enough that its choices vary."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).double().eval()


MODEL = small_model()
PROMPTS = [[3, 9, 11], [5], [12, 30, 2, 2, 8, 21, 17], [9, 3, 11], [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13]]
GREEDY = Sampling(max_new_tokens=24)
SAMPLED = Sampling(max_new_tokens=24, temperature=1.3, seed=5)


def greedy_by_hand(prompt: list[int], limit: int) -> tuple[tuple[int, ...], str]:
    """One token at a time, the whole text anew each time: no cache, no padding, no batch."""
    ids = list(prompt)
    for _ in range(limit):
        with torch.no_grad():
            ids.append(int(MODEL(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == STOP:
            return tuple(ids[len(prompt) : -1]), "stop"
    return tuple(ids[len(prompt) :]), "length"


def test_greedy_batches_equal_decoding_by_hand():
    generate = TargetGenerator(MODEL, pad_id=0, stop_ids=[STOP])
    answers = generate(PROMPTS, GREEDY)
    assert [(answer.ids, answer.finish_reason) for answer in answers] == [greedy_by_hand(p, 24) for p in PROMPTS]
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert len({answer.ids for answer in answers}) == len(PROMPTS)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, dataclasses.replace(SAMPLED, top_k=5, top_p=0.8)])
def test_an_answer_does_not_depend_on_its_batch(sampling):
    generate = TargetGenerator(MODEL, pad_id=0, stop_ids=[STOP])
    together = generate(PROMPTS, sampling)
    assert together == [generate([prompt], sampling)[0] for prompt in PROMPTS]
    assert together[::-1] == generate(PROMPTS[::-1], sampling)


def test_the_pad_id_is_never_seen():
    assert TargetGenerator(MODEL, 0, [STOP])(PROMPTS, SAMPLED) == TargetGenerator(MODEL, 33, [STOP])(PROMPTS, SAMPLED)


def test_sampled_answers_ignore_the_global_stream():
    generate = TargetGenerator(MODEL, pad_id=0, stop_ids=[STOP])
    torch.manual_seed(1)
    first = generate(PROMPTS, SAMPLED)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert generate(PROMPTS, SAMPLED) == first
    assert torch.equal(torch.get_rng_state(), state)
    other = generate(PROMPTS, dataclasses.replace(SAMPLED, seed=6))
    assert all(a.ids != b.ids for a, b in zip(first, other, strict=True))


def test_seeds_tell_prompts_apart():
    seeds = {answer_seed(ids, seed) for ids in ([1, 2], [12], [1], [2, 1]) for seed in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_gumbel_draws_follow_the_tempered_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]])
    sampling = Sampling(max_new_tokens=1, temperature=0.7)
    draws = 6000
    processor = KeyedGumbel(sampling, [answer_seed([index], 0) for index in range(draws)])
    chosen = processor(torch.zeros(draws, 1), logits.expand(draws, -1)).argmax(-1)
    share = torch.bincount(chosen, minlength=5) / draws
    expected = (logits[0] / 0.7).softmax(-1)
    tolerance = 4 * (expected * (1 - expected) / draws).sqrt()
    assert ((share - expected).abs() < tolerance).all()


def test_later_tokens_of_a_row_get_fresh_noise():
    processor = KeyedGumbel(Sampling(max_new_tokens=2, temperature=1.0), [3])
    flat = torch.zeros(1, 50)
    assert not torch.equal(processor(torch.zeros(1, 1), flat), processor(torch.zeros(1, 2), flat))


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.5), (0, 0.9), (4, 0.7), (1, 1.0), (99, 0.01)])
def test_filters_keep_what_sorting_by_hand_keeps(top_k, top_p):
    torch.manual_seed(top_k)
    logits = torch.randn(6, 12) * 2
    kept = keep_likely(logits, top_k, top_p)
    for row, filtered in zip(logits.tolist(), kept.tolist(), strict=True):
        order = sorted(range(12), key=lambda token: -row[token])[: top_k or None]
        weights = [math.exp(row[token]) for token in order]
        expected, mass = set(), 0.0
        for token, weight in zip(order, weights, strict=True):
            if mass / sum(weights) >= top_p:
                break
            expected.add(token)
            mass += weight
        assert {token for token, value in enumerate(filtered) if value > float("-inf")} == expected
        assert all(filtered[token] == row[token] for token in expected)


def test_the_folders_own_generation_settings_do_not_leak_in():
    model = small_model()
    plain = TargetGenerator(model, pad_id=0, stop_ids=[STOP])(PROMPTS, GREEDY)
    own = GenerationConfig(
        repetition_penalty=3.0, no_repeat_ngram_size=1, do_sample=True, min_new_tokens=20, suppress_tokens=[3, 5]
    )
    model.generation_config = own
    assert TargetGenerator(model, pad_id=0, stop_ids=[STOP])(PROMPTS, GREEDY) == plain
    assert model.generation_config is own


def test_any_stop_token_ends_an_answer():
    generate = TargetGenerator(MODEL, pad_id=0, stop_ids=[STOP])
    whole = generate(PROMPTS, GREEDY)
    other = whole[0].ids[1]
    cut = TargetGenerator(MODEL, pad_id=0, stop_ids=[STOP, other])(PROMPTS, GREEDY)
    for before, after in zip(whole, cut, strict=True):
        end = before.ids.index(other) if other in before.ids else len(before.ids)
        assert after.ids == before.ids[:end]


def test_bad_requests_are_refused():
    generate = TargetGenerator(MODEL, pad_id=0, stop_ids=[STOP])
    assert generate([], GREEDY) == []
    with pytest.raises(TargetError, match="prompt 1 is empty"):
        generate([[1], []], GREEDY)
    for field, value in (("max_new_tokens", 0), ("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5)):
        with pytest.raises(TargetError, match=f"{field} is {value}"):
            generate([[1]], dataclasses.replace(GREEDY, **{field: value}))
    with pytest.raises(TargetError, match="at least one stop id"):
        TargetGenerator(MODEL, pad_id=0, stop_ids=[])
