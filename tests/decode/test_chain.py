"""The decode loop: lossless, exact in its limits, with both caches right, and with the training forward's drafts."""

from __future__ import annotations

import pytest
import torch

from informed_choice import Informed
from paceline.decode.chain import speculative_decode
from paceline.decode.compatibility import check_pair
from paceline.decode.loop import greedy_decode
from paceline.errors import DataError, DrafterError

FAMILIES = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "qwen3_5_text": {},
}


def by_hand(target, prompt, count) -> list[int]:
    """Greedy answer without any cache: the whole text anew for every token."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_plain_decoding_equals_decoding_by_hand(make_pair, prompts, model_type):
    target, _ = make_pair(model_type, **FAMILIES[model_type])
    for prompt in (prompts[0], prompts[5]):
        decoded = greedy_decode(target, prompt, max_new_tokens=20)
        assert decoded.ids == by_hand(target, prompt, 20) and decoded.finish == "length"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_speculative_output_is_the_targets_own(make_pair, prompts, model_type):
    target, network = make_pair(model_type, **FAMILIES[model_type])
    total = 0
    for seed, prompt in enumerate(prompts[1::3]):
        whole = greedy_decode(target, prompt, max_new_tokens=50).ids
        choice = Informed(whole, seed)
        decoded = speculative_decode(target, network, prompt, max_new_tokens=40, choice=choice)
        assert decoded.ids == whole[:40]
        assert decoded.accepted == choice.right
        assert [entry.emitted for entry in decoded.passes] == [right + 1 for right in choice.right]
        total += sum(decoded.accepted)
        assert speculative_decode(target, network, prompt, max_new_tokens=12).ids == whole[:12]
    assert total > 60


@pytest.mark.parametrize(
    "drafter",
    [
        {},
        {"layers": ["sliding", "full"], "sliding_window": 4},
        {"layers": ["sliding", "sliding"], "sliding_window": 7, "causal": False},
        {"causal": True, "sample_from_anchor": True},
    ],
    ids=["full", "mixed", "sliding", "from anchor"],
)
def test_drafts_equal_the_training_forwards(make_pair, prompts, drafter):
    target, network = make_pair("qwen3", drafter=drafter)
    spec = network.spec
    for prompt in prompts[1:6:2]:
        whole = greedy_decode(target, prompt, max_new_tokens=50).ids
        choice = Informed(whole, 1)
        decoded = speculative_decode(target, network, prompt, max_new_tokens=30, choice=choice)
        sequence = torch.tensor([*prompt, *whole])
        anchors = [entry.position for entry in decoded.passes]
        features, _ = target.tap_rows(sequence[None], [len(sequence)])
        slots = torch.full((len(anchors), spec.block_size), spec.mask_token_id)
        slots[:, 0] = sequence[anchors]
        with torch.no_grad():
            hidden = network.training_forward(
                features, [len(sequence)], anchors, [len(anchors)], target.embedding[slots]
            )
        expected = hidden[:, spec.first_draft_slot :] @ target.head.T
        # Norms of the target run in float32 whatever its type.
        assert len(choice.logits[0]) == spec.num_drafts
        for row, drafted in enumerate(choice.logits):  # the last block ends with the answer
            torch.testing.assert_close(drafted, expected[row, : len(drafted)], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9])
def test_length_limits_are_exact(make_pair, prompts, limit):
    target, network = make_pair("qwen3")
    whole = greedy_decode(target, prompts[3], max_new_tokens=20).ids
    for seed in range(2):
        decoded = speculative_decode(target, network, prompts[3], max_new_tokens=limit, choice=Informed(whole, seed))
        assert decoded.ids == whole[:limit] and decoded.finish == "length"
        assert sum(entry.emitted for entry in decoded.passes) == limit - 1
        assert all(entry.accepted <= entry.drafted < limit for entry in decoded.passes)
    assert greedy_decode(target, prompts[3], max_new_tokens=limit).ids == whole[:limit]


def test_stop_tokens_end_an_answer_wherever_they_fall(make_pair, prompts):
    target, network = make_pair("qwen3")
    inside = 0
    for prompt in prompts[2:6:2]:
        whole = greedy_decode(target, prompt, max_new_tokens=40).ids
        for stop in sorted(set(whole[:30]))[::3]:
            end = whole.index(stop) + 1
            decoded = speculative_decode(
                target, network, prompt, max_new_tokens=35, stop_ids=[stop, 96], choice=Informed(whole, end)
            )
            assert decoded.ids == whole[:end] and decoded.finish == "stop"
            assert sum(entry.emitted for entry in decoded.passes) == end - 1
            if decoded.passes and decoded.passes[-1].emitted == decoded.passes[-1].accepted:
                inside += 1
    assert inside > 3
    assert greedy_decode(target, prompt, max_new_tokens=40, stop_ids=[stop]).ids == whole[:end]


def test_a_stop_token_at_the_length_limit_counts_as_stop(make_pair, prompts):
    target, network = make_pair("qwen3")
    whole = greedy_decode(target, prompts[4], max_new_tokens=20).ids
    place = max(whole.index(token) for token in whole)
    stop = whole[place]
    for limit, finish in ((place + 1, "stop"), (place, "length")):
        decoded = speculative_decode(target, network, prompts[4], max_new_tokens=limit, stop_ids=[stop])
        assert (decoded.ids, decoded.finish) == (whole[:limit], finish)


def test_the_context_ends_exactly(make_pair, prompts):
    target, network = make_pair("qwen3", max_position_embeddings=30)
    whole = greedy_decode(target, prompts[6], max_new_tokens=99)
    assert len(whole.ids) == 30 - 17 + 1 and whole.finish == "context"
    for seed in range(3):
        choice = Informed([*whole.ids, *range(9)], seed)
        decoded = speculative_decode(target, network, prompts[6], max_new_tokens=99, choice=choice)
        assert (decoded.ids, decoded.finish) == (whole.ids, "context")
    assert len(speculative_decode(target, network, [5] * 30, max_new_tokens=9).ids) == 1
    with pytest.raises(DataError, match=r"has 31 tokens, but .* has 30 positions"):
        speculative_decode(target, network, [5] * 31, max_new_tokens=9)


def test_bad_prompts_are_refused(make_pair):
    target, network = make_pair("qwen3")
    with pytest.raises(DataError, match="holds no tokens"):
        speculative_decode(target, network, [], max_new_tokens=3)
    with pytest.raises(DataError, match="token id 97 is outside"):
        greedy_decode(target, [5, 97], max_new_tokens=3)


def test_a_drafter_of_another_target_is_refused(make_pair):
    target, _ = make_pair("qwen3")
    _, other = make_pair("qwen3", hidden_size=48, num_hidden_layers=3, vocab_size=90)
    with pytest.raises(DrafterError) as error:
        check_pair(target, other.spec)
    named = [line.split()[1] for line in error.value.errors]
    assert named == ["hidden_size", "vocab_size", "num_target_layers"]


def test_features_matter_to_the_drafts(make_pair, prompts):
    target, network = make_pair("qwen3")
    whole = greedy_decode(target, prompts[5], max_new_tokens=40).ids
    seeing, blind = Informed(whole, 2), Informed(whole, 2)
    speculative_decode(target, network, prompts[5], max_new_tokens=20, choice=seeing)
    speculative_decode(target, network, prompts[5], max_new_tokens=20, choice=blind, without_features=True)
    assert not torch.allclose(torch.cat(seeing.logits), torch.cat(blind.logits), atol=1e-2)
