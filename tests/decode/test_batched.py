"""Several prompts at once answer what each answers alone: tokens, passes and endings."""

from __future__ import annotations

import pytest
import torch

from informed_choice import Informed
from paceline.decode import batch_session, batched, kv_cache
from paceline.decode.batched import batch_decode
from paceline.decode.chain import speculative_decode
from paceline.decode.loop import greedy_decode
from paceline.decode.sampling import Sampled
from paceline.errors import DataError

FAMILIES = {"qwen3": {}, "mistral": {"sliding_window": 8}, "gemma2": {"sliding_window": 8}}


@pytest.fixture
def cramped(monkeypatch):
    """Little room everywhere, so that caches grow and holes are closed often."""
    monkeypatch.setattr(kv_cache, "SMALLEST", 4)
    monkeypatch.setattr(batched, "ROOM", 4)
    monkeypatch.setattr(batch_session, "SPARE", 2)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_answers_are_those_of_prompts_alone(make_pair, prompts, model_type, cramped):
    target, network = make_pair(model_type, **FAMILIES[model_type])
    whole = [greedy_decode(target, prompt, max_new_tokens=45).ids for prompt in prompts]
    stops = [whole[0][9], whole[3][14], whole[6][20]]
    limits = {"max_new_tokens": 30, "stop_ids": stops}
    alone, choices = [], [Informed(answer, seed) for seed, answer in enumerate(whole)]
    for seed, (prompt, answer) in enumerate(zip(prompts, whole, strict=True)):
        alone.append(speculative_decode(target, network, prompt, choice=Informed(answer, seed), **limits))
    done: list[int] = []
    together = batch_decode(target, network, prompts, batch_size=3, choices=choices, progress=done.append, **limits)
    assert [(one.ids, one.finish) for one in together] == [(one.ids, one.finish) for one in alone]
    assert [one.passes for one in together] == [one.passes for one in alone]
    assert "stop" in {one.finish for one in together} and len({len(one.ids) for one in together}) > 3
    assert sum(sum(one.accepted) for one in together) > 30
    assert done == sorted(done) and done[-1] == len(prompts)


def test_drafts_are_those_of_prompts_alone(make_pair, prompts, cramped):
    """What the drafter says, not only what is accepted: its context of every row is right."""
    target, network = make_pair("qwen3", drafter={"layers": ["sliding", "full"], "sliding_window": 7})
    whole = [greedy_decode(target, prompt, max_new_tokens=45).ids for prompt in prompts[2:6]]
    alone, together = ([Informed(answer, seed) for seed, answer in enumerate(whole)] for _ in range(2))
    for prompt, choice in zip(prompts[2:6], alone, strict=True):
        speculative_decode(target, network, prompt, max_new_tokens=25, choice=choice)
    batch_decode(target, network, prompts[2:6], batch_size=4, max_new_tokens=25, choices=together)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(torch.cat(other.logits), torch.cat(one.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_greedy_answers_are_the_targets_own(make_pair, prompts, batch_size):
    target, network = make_pair("qwen3")
    together = batch_decode(target, network, prompts, batch_size=batch_size, max_new_tokens=12)
    for prompt, decoded in zip(prompts, together, strict=True):
        assert decoded.ids == greedy_decode(target, prompt, max_new_tokens=12).ids


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_context_ends_exactly_for_each(make_pair, prompts, model_type):
    """Rows near the end have shorter blocks than others; what fills them up leaves no NaN, eager attention included."""
    target, network = make_pair(model_type, **FAMILIES[model_type], max_position_embeddings=30)
    asked = [prompts[7], prompts[6], [5] * 30, prompts[1]]
    together = batch_decode(target, network, asked, batch_size=3, max_new_tokens=12)
    assert [decoded.finish for decoded in together] == ["context", "length", "context", "length"]
    for prompt, decoded in zip(asked, together, strict=True):
        assert decoded.ids == greedy_decode(target, prompt, max_new_tokens=12).ids
    with pytest.raises(DataError, match=r"has 31 tokens, but .* has 30 positions"):
        batch_decode(target, network, [prompts[1], [5] * 31], batch_size=2, max_new_tokens=3)


def test_sampled_answers_do_not_depend_on_their_company(make_pair, prompts):
    target, network = make_pair("qwen3")
    alone = [
        speculative_decode(target, network, prompt, max_new_tokens=15, choice=Sampled(1.0, seed)).ids
        for seed, prompt in enumerate(prompts)
    ]
    choices = [Sampled(1.0, seed) for seed in range(len(prompts))]
    together = batch_decode(target, network, prompts, batch_size=5, max_new_tokens=15, choices=choices)
    assert [decoded.ids for decoded in together] == alone


def test_prompts_on_a_recurrent_target_answer_as_alone(make_pair, prompts):
    """Each row keeps a state for itself, and rejected drafts of one leave nothing in another's."""
    target, network = make_pair("qwen3_5_text")
    asked = prompts[1:4]
    whole = [greedy_decode(target, prompt, max_new_tokens=14).ids for prompt in asked]
    limits = {"max_new_tokens": 8, "stop_ids": [whole[1][4]]}
    choices = [Informed(answer, seed) for seed, answer in enumerate(whole)]
    together = batch_decode(target, network, asked, batch_size=2, choices=choices, **limits)
    for seed, (prompt, decoded) in enumerate(zip(asked, together, strict=True)):
        alone = speculative_decode(target, network, prompt, choice=Informed(whole[seed], seed), **limits)
        assert (decoded.ids, decoded.finish, decoded.passes) == (alone.ids, alone.finish, alone.passes)
    assert sum(sum(decoded.accepted) for decoded in together) > 3
