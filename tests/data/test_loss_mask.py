"""Chat templates by what they do: each with the exact text that is supervised, and tokens equal to serving's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import template_families as families
from paceline.data.chat_template import Renderer
from paceline.data.encoder import Encoder
from paceline.data.loss_mask import Sample, check_generation_tags, samples_of
from paceline.data.rows import Conversation, RowRejected, read_row
from paceline.data.tokenizer import load_tokenizer
from template_families import Family

U, A, S, T = "user", "assistant", "system", "tool"


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TWO = [turn(U, "Hi"), turn(A, "Hello."), turn(U, "2 + 2?"), turn(A, "4")]


@dataclass(frozen=True)
class Case:
    """A conversation in a family, and the supervised texts of each sample it must give."""

    family: Family
    row: dict[str, Any]
    supervised: list[list[str]]
    notes: set[str] = field(default_factory=set)


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


CASES = {
    "chatml": Case(families.CHATML, chat(turn(S, "Be terse."), *TWO), [["Hello.<|im_end|>", "4<|im_end|>"]]),
    "chatml, answers one after another": Case(
        families.CHATML, chat(turn(U, "Hi"), turn(A, "a"), turn(A, "b")), [["a<|im_end|>", "b<|im_end|>"]]
    ),
    "chatml, question after the last answer": Case(
        families.CHATML, chat(turn(U, "Hi"), turn(A, "a"), turn(U, "more?")), [["a<|im_end|>"]]
    ),
    "chatml, greeting before the first question": Case(
        families.CHATML, chat(turn(A, "Welcome"), turn(U, "Hi"), turn(A, "a")), [["a<|im_end|>"]]
    ),
    "chatml, white space at the border": Case(
        families.CHATML,
        chat(turn(U, "Hi"), turn(A, "\n\n  indented\n")),
        [["\n\n  indented\n<|im_end|>"]],
        {"merged_border"},
    ),
    "generation tags": Case(families.TAGGED, chat(*TWO), [["Hello.<|im_end|>", "4<|im_end|>"]]),
    "headers": Case(families.HEADERS, chat(turn(S, " s "), turn(U, "Hi"), turn(A, "  Hello.\n")), [["Hello.<|eot|>"]]),
    "instruct": Case(families.INSTRUCT, chat(turn(S, "Be terse."), *TWO), [[" Hello. </s>", " 4 </s>"]]),
    "turns": Case(families.TURNS, chat(*TWO), [["Hello.</turn>", "4</turn>"]]),
    "thinking, once": Case(
        families.THINKING,
        chat(turn(U, "Hi"), turn(A, "Hello.", reasoning_content="greet")),
        [["<think>\ngreet\n</think>\n\nHello.<|im_end|>"]],
    ),
    "thinking, off": Case(families.THINKING, chat(turn(U, "Hi"), turn(A, "Hello.")), [["Hello.<|im_end|>"]]),
    "thinking, off, line ends read otherwise alone": Case(
        families.THINKING_WORDS, chat(turn(U, "Hi"), turn(A, "Hello.")), [["Hello.<|im_end|>"]], {"merged_border"}
    ),
    "header tags": Case(families.HEADER_TAGGED, chat(*TWO), [["Hello.<|im_end|>", "4<|im_end|>"]]),
    "thinking, rewritten history": Case(
        families.THINKING,
        chat(
            turn(U, "Hi"),
            turn(A, "Hello.", reasoning_content="greet"),
            turn(U, "2 + 2?"),
            turn(A, "4", reasoning="add"),
            turn(U, "3?"),
            turn(A, "no thought"),
        ),
        [
            ["<think>\ngreet\n</think>\n\nHello.<|im_end|>"],
            ["<think>\nadd\n</think>\n\n4<|im_end|>"],
            ["no thought<|im_end|>"],
        ],
        {"history_rewritten", "empty_thought"},
    ),
    "thinking, a call and its result share a sample": Case(
        families.THINKING,
        chat(
            turn(U, "Hi"),
            turn(A, "", reasoning_content="use it", tool_calls=CALL),
            turn(T, "2"),
            turn(A, "It is 2.", reasoning_content="done"),
        ),
        [
            [
                '<think>\nuse it\n</think>\n\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>',
                "<think>\ndone\n</think>\n\nIt is 2.<|im_end|>",
            ]
        ],
    ),
    "thinking, switched on by the row": Case(
        families.THINKING,
        chat(turn(U, "Hi"), turn(A, "Hello."), chat_template_kwargs={"enable_thinking": True}),
        [["Hello.<|im_end|>"]],
        {"empty_thought"},
    ),
    "empty think tags that no prompt has": Case(
        families.NO_SWITCH, chat(turn(U, "Hi"), turn(A, "Hello.")), [["Hello.<|im_end|>"]], {"empty_thought"}
    ),
    "empty think tags before a call": Case(
        families.NO_SWITCH,
        chat(turn(U, "Hi"), turn(A, "", tool_calls=CALL)),
        [['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>']],
        {"empty_thought"},
    ),
    "opened thought, raw": Case(
        families.ALWAYS_THINKS,
        chat(turn(U, "Hi"), turn(A, "<think>\ngreet\n</think>\n\nHello.")),
        [["greet\n</think>\n\nHello.<|stop|>"]],
    ),
    "opened thought, apart": Case(
        families.ALWAYS_THINKS,
        chat(
            turn(U, "Hi"),
            turn(A, "Hello.", reasoning_content="greet"),
            turn(U, "3?"),
            turn(A, "4", reasoning_content="add"),
        ),
        [["greet\n</think>\n\nHello.<|stop|>"], ["add\n</think>\n\n4<|stop|>"]],
        {"history_rewritten"},
    ),
    "tools": Case(
        families.TOOLS,
        chat(turn(U, "Hi"), {"role": A, "content": None, "tool_calls": CALL}, turn(T, "2"), turn(A, "2."), tools=[ADD]),
        [['<call>{"name": "add", "arguments": {"a": 1}}</call><|im_end|>', "2.<|im_end|>"]],
    ),
    "tools, arguments as text": Case(
        families.TOOLS,
        chat(
            turn(U, "Hi"),
            turn(A, "", tool_calls=[{"function": {"name": "add", "arguments": '{"a": 1}'}}]),
            turn(T, [{"type": "text", "text": "2"}]),
            turn(A, [{"type": "text", "text": "It is"}, {"type": "text", "text": "2."}]),
        ),
        [['<call>{"name": "add", "arguments": {"a": 1}}</call><|im_end|>', "It is\n2.<|im_end|>"]],
    ),
    "tools that move": Case(
        families.TOOLS_MOVE, chat(*TWO, tools=[ADD]), [["Hello.</s>"], ["4</s>"]], {"history_rewritten"}
    ),
    "tools that move, none given": Case(families.TOOLS_MOVE, chat(*TWO), [["Hello.</s>", "4</s>"]]),
    "stripping": Case(families.STRIPPING, chat(*TWO), [["Hello.<|end|>", "4<|end|>"]]),
    "stripping before": Case(
        families.STRIPPING_BEFORE, chat(turn(U, "Hi"), turn(A, "Hello. ")), [["Hello.<|im_end|>"]]
    ),
    "channels": Case(
        families.CHANNELS,
        chat(turn(U, "Hi"), turn(A, "Hello.", reasoning_content="greet"), turn(U, "2?"), turn(A, "4")),
        [
            ["<|channel|>analysis<|message|>greet<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"],
            ["<|channel|>final<|message|>4<|return|>"],
        ],
        {"history_rewritten"},
    ),
    "words": Case(
        families.WORDS,
        chat(turn(U, "no"), turn(A, " yes"), turn(U, "no"), turn(A, " yes")),
        [[" yes</s>"], [" yes</s>"]],
        {"merged_border", "history_rewritten"},
    ),
    "another end": Case(
        families.OTHER_END, chat(*TWO), [["Hello.<|im_end|>", "4<|im_end|>"]], {"closing_is_no_end_token"}
    ),
    "no end": Case(families.NO_END, chat(turn(U, "Hi"), turn(A, "Hello.")), [["Hello."]], {"no_closing_token"}),
    "metaspace": Case(families.METASPACE, chat(*TWO), [["Hello.</s>", "4</s>"]]),
}


def prepare_case(family: Family, row: dict[str, Any], folder: str, **more: Any) -> tuple[list[Sample], Any]:
    tokenizer = load_tokenizer(folder)
    conversation = read_row(row)
    assert isinstance(conversation, Conversation)
    return samples_of(conversation, Renderer(tokenizer), Encoder(tokenizer, [" a"]), **more), tokenizer


def supervised_texts(sample: Sample, tokenizer: Any) -> list[str]:
    spans = sample.spans.reshape(-1, 2).tolist()
    return [tokenizer.decode(sample.ids[a:b].tolist(), skip_special_tokens=False) for a, b in spans]


@pytest.mark.parametrize("name", CASES)
def test_supervised_text_is_exactly_what_the_target_writes(name: str, family_folder: Callable[[Family], str]) -> None:
    case = CASES[name]
    samples, tokenizer = prepare_case(case.family, case.row, family_folder(case.family))
    assert [supervised_texts(sample, tokenizer) for sample in samples] == case.supervised
    assert {note for sample in samples for note in sample.notes} == case.notes


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].notes & {"empty_thought"}])
def test_tokens_before_each_answer_are_those_that_a_server_feeds(
    name: str, family_folder: Callable[[Family], str]
) -> None:
    case = CASES[name]
    samples, tokenizer = prepare_case(case.family, case.row, family_folder(case.family))
    conversation = read_row(case.row)
    assert isinstance(conversation, Conversation)
    asked = next(place for place, message in enumerate(conversation.messages) if message["role"] == U)
    places = [k for k, message in enumerate(conversation.messages) if message["role"] == A and k > asked]
    starts = [sample.ids[:start].tolist() for sample in samples for start in sample.spans[::2].tolist()]
    assert len(starts) == len(places)
    for start, place in zip(starts, places, strict=True):
        served = [
            tokenizer.apply_chat_template(
                conversation.messages[:place],
                tools=conversation.tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **{**conversation.template, **variant},
            )
            for variant in ({}, {"enable_thinking": False})
        ]
        assert start in served


@pytest.mark.parametrize("name", CASES)
def test_reading_by_pieces_equals_reading_whole(name: str, family_folder: Callable[[Family], str]) -> None:
    case = CASES[name]
    tokenizer = load_tokenizer(family_folder(case.family))
    conversation = read_row(case.row)
    assert isinstance(conversation, Conversation)
    renderer = Renderer(tokenizer)
    ends = range(1, len(conversation.messages) + 1)
    texts = (
        renderer.texts(conversation, list(ends), conversation.template, generation=True)
        if (case.family is not families.TURNS)
        else [tokenizer.apply_chat_template(conversation.messages, tokenize=False)]
    )
    encoder = Encoder(tokenizer, [" a"])
    for text in texts:
        assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("family", "messages", "reason"),
    [
        (families.TURNS, [turn(S, "s"), *TWO], "template_refuses"),
        (families.ALWAYS_THINKS, TWO, "no_reasoning"),
        (families.CHATML, [turn(U, "Hi"), turn(A, "one<|im_end|>two")], "end_token_inside"),
        (families.CHATML, [turn(A, "Welcome"), turn(U, "Hi")], "no_assistant"),
    ],
)
def test_what_cannot_be_served_is_set_aside(
    family: Family, messages: list[dict[str, Any]], reason: str, family_folder: Callable[[Family], str]
) -> None:
    with pytest.raises(RowRejected) as found:
        prepare_case(family, {"messages": messages}, family_folder(family))
    assert found.value.reason == reason


def test_generation_tags_that_agree_pass_and_others_stop(family_folder: Callable[[Family], str]) -> None:
    for family, agrees in (
        (families.TAGGED, True),
        (families.HEADER_TAGGED, True),
        (families.LYING_TAGS, False),
    ):
        tokenizer = load_tokenizer(family_folder(family))
        conversation = read_row({"messages": TWO})
        assert isinstance(conversation, Conversation)
        renderer, encoder = Renderer(tokenizer), Encoder(tokenizer)
        assert renderer.has_generation_tags
        if agrees:
            check_generation_tags(conversation, renderer, encoder)
        else:
            with pytest.raises(RowRejected) as found:
                check_generation_tags(conversation, renderer, encoder)
            assert found.value.reason == "tags_disagree" and "turn 1: the chat template's" in found.value.detail


def test_the_text_alone_is_learned_where_that_is_meant(family_folder: Callable[[Family], str]) -> None:
    asked, thoughtful = turn(U, "Hi"), turn(A, "Hello.", reasoning_content="greet")
    calling = chat(asked, turn(A, "I look.", tool_calls=CALL, reasoning_content="use it"))
    written = 'I look.<call>{"name": "add", "arguments": {"a": 1}}</call><|im_end|>'
    for family, row, texts in (
        (families.CHATML, chat(asked, thoughtful, turn(U, "2?"), turn(A, "4")), ["Hello.<|im_end|>", "4<|im_end|>"]),
        (families.CHATML, calling, ["I look.<|im_end|>"]),
        (families.TOOLS, calling, [written]),
    ):
        folder = family_folder(family)
        with pytest.raises(RowRejected, match="not_written"):
            prepare_case(family, row, folder)
        (sample,), tokenizer = prepare_case(family, row, folder, on_not_written="text")
        assert supervised_texts(sample, tokenizer) == texts and sample.notes == ("text_alone",)
        assert "no-thinking" in sample.tags and "thinking" not in sample.tags
    folder = family_folder(families.THINKING)
    (sample,), _ = prepare_case(families.THINKING, chat(asked, thoughtful), folder, on_not_written="text")
    assert "thinking" in sample.tags and not sample.notes, "what the template writes is learned whole"
    call_alone, folder = chat(asked, turn(A, "", tool_calls=CALL)), family_folder(families.CHATML)
    with pytest.raises(RowRejected, match="empty_text"):
        prepare_case(families.CHATML, call_alone, folder, on_not_written="text")


def test_token_ids_of_a_server_are_used_if_they_fit_the_text(family_folder: Callable[[Family], str]) -> None:
    folder = family_folder(families.CHATML)
    tokenizer = load_tokenizer(folder)
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "Hello."]
    usual = tokenizer.encode("Hello.", add_special_tokens=False)
    assert letters != usual and tokenizer.decode(letters) == "Hello."
    end = tokenizer.eos_token_id
    for given, learned in (
        (letters, letters),
        ([*letters, end], letters),
        (letters[:-1], usual),
        ([*letters, letters[0]], usual),
    ):
        row = chat(turn(U, "Hi"), turn(A, "Hello.", token_ids=given), turn(U, "2?"), turn(A, "4"))
        samples, _ = prepare_case(families.CHATML, row, folder)
        found = [sample.ids[a:b].tolist() for sample in samples for a, b in sample.spans.reshape(-1, 2).tolist()]
        assert found == [[*learned, end], [*tokenizer.encode("4", add_special_tokens=False), end]]


def test_a_turn_without_loss_is_context(family_folder: Callable[[Family], str]) -> None:
    folder = family_folder(families.CHATML)
    row = chat(*TWO[:1], {**TWO[1], "weight": 0}, *TWO[2:], turn(U, "3?"), turn(A, "6", loss=False))
    (sample,), tokenizer = prepare_case(families.CHATML, row, folder)
    assert supervised_texts(sample, tokenizer) == ["4<|im_end|>"]
    assert "Hello.<|im_end|>" in tokenizer.decode(sample.ids) and "3?" not in tokenizer.decode(sample.ids)
    with pytest.raises(RowRejected, match="nothing_supervised"):
        prepare_case(families.CHATML, chat(turn(U, "Hi"), turn(A, "Hello.", train=False)), folder)
