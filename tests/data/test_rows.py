"""Rows of every form, and what each turn says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.data.rows import Conversation, ReadyTokens, RowRejected, read_row

U = {"role": "user", "content": "Hi"}
A = {"role": "assistant", "content": "Hello."}


def conversation(**row: Any) -> Conversation:
    found = read_row(row)
    assert isinstance(found, Conversation)
    return found


def rejected(**row: Any) -> tuple[str, str]:
    with pytest.raises(RowRejected) as found:
        read_row(row)
    return found.value.reason, found.value.detail


def test_a_system_text_beside_the_turns_goes_first() -> None:
    system = {"role": "system", "content": "Be terse."}
    told = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    assert conversation(system="Be terse.", conversations=told).messages == [system, U, A]
    assert conversation(system="Be terse.", messages=[U, A]).messages == [system, U, A]
    assert conversation(system="Be terse.", prompt="Hi", response="Hello.").messages == [system, U, A]
    assert conversation(system="Be terse.", messages=[system, U, A]).messages == [system, U, A]
    assert conversation(system="", messages=[U, A]).messages == conversation(system=None, messages=[U, A]).messages
    assert rejected(system="Other.", messages=[system, U, A])[0] == "wrong_roles"
    assert rejected(system=["Be terse."], messages=[U, A])[0] == "wrong_roles"


@pytest.mark.parametrize("key", ["images", "image", "videos", "audios"])
def test_rows_with_media_are_not_text(key: str) -> None:
    assert rejected(messages=[U, A], **{key: ["a.png"]}) == ("not_text", f"the row has {key}")
    assert conversation(messages=[U, A], **{key: []}).messages == [U, A]


@pytest.mark.parametrize("said", [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"train": False}, {"training": 0}])
def test_a_turn_can_be_context_without_loss(said: dict[str, Any]) -> None:
    found = conversation(messages=[U, {**A, **said}, U, {**A, "weight": 1, "train": True}])
    assert found.messages == [U, A, U, A] and found.without_loss == {1}
    told = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello.", **said}]
    assert conversation(conversations=told).without_loss == {1}


TEXT = {"type": "text", "text": "Hello."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    "said",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"tool_calls": '[{"function": {"name": "add", "arguments": {"a": 1}}}]'},
        {"tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
        {"tool_calls": [{"name": "add", "parameters": '{"a": 1}'}]},
        {"function_call": {"name": "add", "arguments": '{"a": 1}'}},
    ],
)
def test_calls_of_every_form_are_read_as_objects(said: dict[str, Any]) -> None:
    found = conversation(
        messages=[U, {"role": "assistant", "content": None, **said}, {"role": "tool", "content": "2"}, A]
    )
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_calls_of_old_and_sharegpt_rows() -> None:
    old = {"role": "function", "name": "add", "content": "2"}
    found = conversation(messages=[U, {**A, "function_call": {"name": "add", "arguments": ""}}, old, A])
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}
    assert found.messages[2] == {"role": "tool", "name": "add", "content": "2"}
    turns = [
        ("human", "Hi"),
        ("function_call", '{"name": "add", "arguments": {"a": 1}}'),
        ("observation", "2"),
        ("gpt", "2."),
    ]
    found = conversation(
        conversations=[{"from": speaker, "value": said} for speaker, said in turns], tools='[{"a": 1}]'
    )
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert found.messages[2]["role"] == "tool" and found.tools == [{"a": 1}]


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        (
            {"tool_calls": [{"function": {"name": "add", "arguments": "{oops"}}]},
            "the arguments of a tool call cannot be read",
        ),
        ({"tool_calls": [{"function": {}}]}, "a tool call names no function"),
        ({"tool_calls": {"a": 1}}, "tool_calls is not a list of objects"),
        ({"reasoning_content": {"a": 1}}, "its reasoning is not text"),
    ],
)
def test_turns_that_cannot_be_read_say_what_is_wrong(said: dict[str, Any], detail: str) -> None:
    reason, found = rejected(messages=[U, {**A, **said}])
    assert reason == "wrong_roles" and detail in found and "turn 1" in found


@pytest.mark.parametrize(
    "said",
    [
        {"reasoning_content": "why"},
        {"reasoning": "why", "thinking": None},
        {"thinking": "why"},
        {"thinking": True, "reasoning": "why"},
        {"reasoning": "why", "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "wh"}, {"type": "reasoning.text", "text": "y"}]},
        {"content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "Hello."}]},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "why"}]},
                {"type": "text", "text": "Hello."},
            ]
        },
    ],
)
def test_a_thought_is_read_whatever_its_name(said: dict[str, Any]) -> None:
    assert conversation(messages=[U, {**A, **said}]).messages[1] == {**A, "reasoning_content": "why"}


def test_thoughts_that_are_empty_or_cannot_be_known() -> None:
    assert conversation(messages=[U, {**A, "reasoning_content": "", "tool_calls": []}]).messages == [U, A]
    assert rejected(messages=[U, {**A, "reasoning_details": [{"type": "reasoning.encrypted"}]}])[0] == "not_written"


def test_token_ids_of_answers_are_kept_beside_the_turns() -> None:
    found = conversation(messages=[U, {**A, "token_ids": [4, 5]}, U, {**A, "token_ids": ["x"]}])
    assert found.messages == [U, A, U, A] and dict(found.token_ids) == {1: [4, 5]}


@pytest.mark.parametrize(
    ("row", "ids", "learned"),
    [
        ({"loss_mask": [0, 0, 1, 1]}, [7, 8, 9, 2], [2, 3]),
        ({"labels": [-100, -100, 9, 2]}, [7, 8, 9, 2], [2, 3]),
        ({"labels": [-100, 9, 2, -100]}, [7, 8, 9, 2], [2, 3]),  # shifted: the label of a place is the next token
        ({"labels": [-100, -100, 9, 2], "attention_mask": [0, 1, 1, 1]}, [8, 9, 2], [1, 2]),
        ({"labels": [-100, 8, 9, -100], "attention_mask": [1, 1, 1, 0]}, [7, 8, 9], [1, 2]),
        ({"loss_mask": [0, 1, 1, 0], "attention_mask": None}, [7, 8, 9, 2], [1, 2]),
    ],
)
def test_ready_tokens_with_a_mask_or_labels(row: dict[str, Any], ids: list[int], learned: list[int]) -> None:
    found = read_row({"input_ids": [7, 8, 9, 2], **row})
    assert isinstance(found, ReadyTokens) and list(found.ids) == ids
    assert [place for place, flag in enumerate(found.loss_mask) if flag] == learned


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "without loss_mask (0 and 1) or labels (-100 where not)"),
        ({"labels": [-100, 9]}, "labels are not lists of one length"),
        ({"labels": [-100, -100, 8, 2]}, "neither -100 nor the ids"),
        ({"labels": [9, 2, -100, -100]}, "neither -100 nor the ids"),  # shifted by two
        ({"labels": "abcd"}, "neither -100 nor the ids"),
        ({"loss_mask": [0, 0, 2, 1]}, "loss_mask holds something other than 0 and 1"),
        ({"loss_mask": [0, 0, 1, 1], "attention_mask": [1, 0, 1, 1]}, "zeros between its ones"),
        (
            {"loss_mask": [0, 0, 1, 1], "attention_mask": [1]},
            "attention_mask are not lists of one length",
        ),
        ({"input_ids": [7, True], "loss_mask": [0, 1]}, "not a token id"),
        ({"input_ids": 7, "loss_mask": [1]}, "not a token id"),
    ],
)
def test_ready_tokens_that_do_not_fit_are_refused(row: dict[str, Any], words: str) -> None:
    reason, detail = rejected(**{"input_ids": [7, 8, 9, 2], **row})
    assert reason == "bad_tokens" and words in detail
