"""The demo's embedded target and chats are what their notes say: small, loadable, apart by document, its own text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import paceline

DEMO = Path(paceline.__file__).parent / "assets" / "demo"
TARGET = DEMO / "target"
TRAINING = json.loads((TARGET / "TRAINING.json").read_text(encoding="utf-8"))


def read(name: str) -> list[dict]:
    """The rows of one of the demo's files."""
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TARGET).eval()


@pytest.fixture(scope="module")
def chats():
    return read("chats.jsonl")


@pytest.fixture(scope="module")
def held_out():
    return read("heldout.jsonl")


def test_sizes_stay_within_what_a_package_may_carry():
    assert sum(path.stat().st_size for path in TARGET.iterdir()) < 8 * 2**20
    assert sum(path.stat().st_size for path in DEMO.glob("*.jsonl")) < 5 * 2**20


def test_the_target_computes_in_float32_with_a_tied_head(model, tokenizer):
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer) == model.model.embed_tokens.weight.shape[0]
    assert sum(parameter.numel() for parameter in model.parameters()) == TRAINING["parameters"]
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.do_sample is False


def test_the_mask_token_is_a_token_of_its_own(model, tokenizer, chats, held_out):
    mask = tokenizer.mask_token_id
    assert tokenizer.convert_tokens_to_ids("<|mask|>") == mask
    assert mask < model.config.vocab_size
    assert mask not in {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert model.model.embed_tokens.weight[mask].norm() > 0
    for row in chats + held_out:
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
        assert mask not in ids
        assert tokenizer.pad_token_id not in ids
        assert len(ids) <= model.config.max_position_embeddings


def test_training_and_evaluation_share_no_document_and_no_prompt(chats, held_out):
    assert {row["document"] for row in held_out} <= set(TRAINING["held_out_documents"])
    assert not {row["document"] for row in chats} & set(TRAINING["held_out_documents"])
    ids = [row["id"] for row in chats + held_out]
    assert len(ids) == len(set(ids))
    asked = [
        {m["content"] for row in rows for m in row["messages"] if m["role"] == "user"} for rows in (chats, held_out)
    ]
    assert not asked[0] & asked[1]


def test_rows_are_whole_conversations_of_varied_length(chats, held_out, tokenizer):
    assert len(chats) >= 900
    assert 56 <= len(held_out) <= 100
    for row in chats + held_out:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * len(row["answer_tokens"])
        assert row["finish_reason"] == "stop"
        assert all(message["content"].strip() for message in row["messages"])
        assert ("multi-turn" in row["tags"]) == (len(row["answer_tokens"]) > 1)
    tags = {row["tags"][0] for row in chats}
    assert tags == {row["tags"][0] for row in held_out}
    assert len(tags) == 6
    share = sum(row["sampling"]["temperature"] > 0 for row in chats) / len(chats)
    assert 0.1 < share < 0.5
    assert all(row["sampling"]["temperature"] == 0 for row in held_out)
    lengths = sorted(
        len(tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]) for row in chats
    )
    assert lengths[len(lengths) // 10] < 60
    assert lengths[-len(lengths) // 20] > 300


def test_evaluation_answers_are_the_targets_own_greedy_ones(model, tokenizer, held_out):
    shortest = {row["tags"][0]: row for row in sorted(held_out, key=lambda row: -sum(row["answer_tokens"]))}
    assert len(shortest) == 6
    for row in shortest.values():
        for turn in range(1, len(row["messages"]), 2):
            prompt = tokenizer.apply_chat_template(
                row["messages"][:turn], add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )["input_ids"]
            with torch.no_grad():
                made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=400)
            answer = made[0, prompt.shape[1] :].tolist()
            assert answer.pop() == tokenizer.eos_token_id
            assert tokenizer.decode(answer) == row["messages"][turn]["content"]
            assert len(answer) == row["answer_tokens"][turn // 2]


def test_the_template_marks_answers_and_their_end_only(tokenizer, held_out):
    row = next(row for row in held_out if len(row["messages"]) > 2)
    messages = [{"role": "system", "content": "Be short."}, *row["messages"]]
    made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = [], []
    for message in messages:
        for text, flag in (
            (f"<|im_start|>{message['role']}\n", 0),
            (f"{message['content']}<|im_end|>", int(message["role"] == "assistant")),
            ("\n", 0),
        ):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            mask += [flag] * len(piece)
    assert made["input_ids"] == ids
    assert made["assistant_masks"] == mask
    asked = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(asked)
    assert asked.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_the_target_predicts_better_than_bigrams(model, tokenizer, held_out):
    assert TRAINING["target"]["answer_loss"] < TRAINING["bigram"]["answer_loss"] - 1.0
    assert TRAINING["target"]["all_loss"] < TRAINING["bigram"]["all_loss"] - 0.5
    losses = []
    for row in held_out[::3]:
        answers = iter(row["reference"])
        messages = [
            {**message, "content": next(answers)} if message["role"] == "assistant" else message
            for message in row["messages"]
        ]
        made = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        ids, answer = made["input_ids"], torch.as_tensor(made["assistant_masks"]).bool().reshape(-1)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")[answer[1:]])
    assert len(losses) > 15
    assert torch.cat(losses).mean() < TRAINING["bigram"]["answer_loss"] - 0.5
