"""Regenerating answers: turn by turn, resumable, independent of order and batch, cut answers kept apart."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.errors import DataError
from paceline.regenerate.local import LocalAnswers
from paceline.regenerate.loop import RegenerateReport, RegenerateSettings, cut_path, prompt_id
from paceline.regenerate.loop import regenerate as answer_all
from paceline.types import GeneratedAnswer, Sampling

GREEDY = Sampling(max_new_tokens=8)
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ hint | default('') }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


TOKENIZER = byte_tokenizer()


def regenerate(prompts, target, tokenizer, settings, output, batch_size=16) -> RegenerateReport:
    """Answer prompts in this process."""
    return answer_all(
        prompts, LocalAnswers(target, tokenizer, settings, batch_size), settings, output, tokenizer=tokenizer
    )


class Echo:
    """A target that answers with what it was asked last, in capitals; it keeps what it saw."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.batches: list[list[str]] = []
        self.fail_after = fail_after

    def __call__(self, prompts, sampling):
        if self.fail_after is not None and len(self.batches) == self.fail_after:
            raise KeyboardInterrupt
        texts = [TOKENIZER.decode(prompt) for prompt in prompts]
        self.batches.append(texts)
        answers = []
        for text in texts:
            ids = TOKENIZER.encode(text.split("<user>")[-1].split("</>")[0].upper(), add_special_tokens=False)
            reason = "stop" if len(ids) < sampling.max_new_tokens else "length"
            answers.append(GeneratedAnswer(tuple(ids[: sampling.max_new_tokens]), reason))
        return answers


def row(*turns: str, **extras):
    """A prompt of user turns."""
    return {"messages": [{"role": "user", "content": turn} for turn in turns], **extras}


def read(path: Path) -> list[dict]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_turn_is_asked_with_the_answers_before_it(tmp_path):
    target = Echo()
    prompts = [row("hi", "you"), row("one"), {"messages": [{"role": "system", "content": "s"}, *row("é")["messages"]]}]
    report = regenerate(prompts, target, TOKENIZER, RegenerateSettings(GREEDY), tmp_path / "out.jsonl")
    assert target.batches == [
        ["<user>hi</><assistant>", "<user>one</><assistant>", "<system>s</><user>é</><assistant>"],
        ["<user>hi</><assistant>HI</><user>you</><assistant>"],
    ]
    rows = sorted(read(tmp_path / "out.jsonl"), key=lambda made: made["messages"][0]["content"])
    assert [message["content"] for message in rows[0]["messages"]] == ["hi", "HI", "you", "YOU"]
    assert rows[0]["answer_tokens"] == [2, 3]
    assert [message["role"] for message in rows[2]["messages"]] == ["system", "user", "assistant"]
    assert rows[2]["messages"][2]["content"] == "É"
    assert {item["finish_reason"] for item in rows} == {"stop"}
    assert rows[0]["sampling"] == {"max_new_tokens": 8, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    assert (report.written, report.cut, report.answer_tokens) == (3, 0, 2 + 3 + 3 + 2)
    assert not cut_path(tmp_path / "out.jsonl").exists()


def test_old_answers_are_replaced_and_other_keys_kept(tmp_path):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "of another model"},
        {"role": "user", "content": "b"},
    ]
    prompt = {"messages": messages, "tags": ["x"], "id": "theirs"}
    regenerate([prompt], Echo(), TOKENIZER, RegenerateSettings(GREEDY), tmp_path / "out.jsonl")
    (made,) = read(tmp_path / "out.jsonl")
    assert [message["content"] for message in made["messages"]] == ["a", "A", "b", "B"]
    assert made["tags"] == ["x"]
    assert made["prompt_hash"] == prompt_id(messages) == prompt_id(row("a", "b")["messages"])
    assert made["id"] == "theirs"
    assert (
        regenerate([prompt], Echo(), TOKENIZER, RegenerateSettings(GREEDY), tmp_path / "out.jsonl").already_there == 1
    )


def test_what_was_said_of_replaced_answers_goes_with_them(tmp_path):
    prompt = row("a", truncated=True, finish_reason="length", answer_tokens=[9], sampling={}, model="other")
    regenerate([prompt], Echo(), TOKENIZER, RegenerateSettings(GREEDY, model="me"), tmp_path / "out.jsonl")
    (made,) = read(tmp_path / "out.jsonl")
    assert "truncated" not in made and made["finish_reason"] == "stop" and made["answer_tokens"] == [1]
    assert made["model"] == "me" and made["sampling"]["max_new_tokens"] == 8


def test_one_question_in_several_modes_is_answered_in_each(tmp_path):
    prompts = [row("a"), row("a", enable_thinking=True), row("a", chat_template_kwargs={"hint": "?", "other": 1})]
    prompts += [row("a", chat_template_kwargs={"other": 1, "hint": "?"}), row("a", chat_template_kwargs={"hint": "!"})]
    target = Echo()
    report = regenerate(prompts, target, TOKENIZER, RegenerateSettings(GREEDY), tmp_path / "out.jsonl")
    assert (report.written, report.repeated) == (4, 1)
    assert [text.removeprefix("<user>a</><assistant>") for text in target.batches[0]] == ["", "", "?", "!"]
    assert len({made["prompt_hash"] for made in read(tmp_path / "out.jsonl")}) == 4


def test_ids_tell_prompts_apart():
    ids = {
        prompt_id(row("a", "b")["messages"]),
        prompt_id(row("ab")["messages"]),
        prompt_id(row("b", "a")["messages"]),
        prompt_id([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]),
    }
    assert len(ids) == 4


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_rows_do_not_depend_on_order_or_batch(tmp_path, batch_size):
    prompts = [row(*(f"q{index}.{turn}" for turn in range(1 + index % 3))) for index in range(11)]
    regenerate(prompts, Echo(), TOKENIZER, RegenerateSettings(GREEDY), tmp_path / "one.jsonl", 3)
    random.Random(batch_size).shuffle(prompts)
    regenerate(prompts, Echo(), TOKENIZER, RegenerateSettings(GREEDY), tmp_path / "two.jsonl", batch_size)
    one, two = ({item["id"]: item for item in read(tmp_path / name)} for name in ("one.jsonl", "two.jsonl"))
    assert one == two


def test_a_killed_run_continues_where_it_stopped(tmp_path):
    prompts = [row(f"q{index}") for index in range(7)]
    settings = RegenerateSettings(GREEDY)
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    regenerate(prompts, Echo(), TOKENIZER, settings, whole, 2)
    with pytest.raises(KeyboardInterrupt):
        regenerate(prompts, Echo(fail_after=2), TOKENIZER, settings, output, 2)
    assert len(read(output)) == 4
    with output.open("ab") as file:
        file.write(b'{"id":"torn","mess')
    target = Echo()
    report = regenerate(prompts, target, TOKENIZER, settings, output, 2)
    assert output.read_bytes() == whole.read_bytes()
    assert (report.already_there, report.written, sum(map(len, target.batches))) == (4, 3, 3)


def test_the_same_prompt_is_asked_once(tmp_path):
    report = regenerate(
        [row("a"), row("b"), row("a")], Echo(), TOKENIZER, RegenerateSettings(GREEDY), tmp_path / "out.jsonl"
    )
    assert (report.written, report.repeated) == (2, 1)
    assert len(read(tmp_path / "out.jsonl")) == 2


def test_cut_answers_go_to_another_file_and_are_not_repeated(tmp_path):
    prompts = [row("fine"), row("much too long", "never asked")]
    output = tmp_path / "out.jsonl"
    report = regenerate(prompts, Echo(), TOKENIZER, RegenerateSettings(GREEDY), output)
    assert (report.written, report.cut) == (1, 1)
    assert [item["messages"][0]["content"] for item in read(output)] == ["fine"]
    (cut,) = read(cut_path(output))
    assert [message["content"] for message in cut["messages"]] == ["much too long", "MUCH TOO"]
    assert cut["finish_reason"] == "length"
    target = Echo()
    report = regenerate(prompts, target, TOKENIZER, RegenerateSettings(GREEDY), output)
    assert (report.already_there, target.batches) == (2, [])


def test_cut_answers_can_be_marked_instead(tmp_path):
    output = tmp_path / "out.jsonl"
    report = regenerate(
        [row("ok", "much too long", "never")], Echo(), TOKENIZER, RegenerateSettings(GREEDY, cut="mark"), output
    )
    (made,) = read(output)
    assert made["finish_reason"] == "length"
    assert [message["content"] for message in made["messages"]] == ["ok", "OK", "much too long", "MUCH TOO"]
    assert (report.written, report.cut, cut_path(output).exists()) == (1, 1, False)


def test_a_turn_that_does_not_fit_the_context_is_not_asked(tmp_path):
    output = tmp_path / "out.jsonl"
    longest = len("<user>ok</><assistant>OK</><user>b</><assistant>") + GREEDY.max_new_tokens
    prompts = [row("ok", "b"), row("ok", "bb"), row("x" * 60)]
    target = Echo()
    settings = RegenerateSettings(GREEDY, cut="mark", max_context_tokens=longest)
    report = regenerate(prompts, target, TOKENIZER, settings, output)
    made = {item["finish_reason"]: [message["content"] for message in item["messages"]] for item in read(output)}
    assert made == {"stop": ["ok", "OK", "b", "B"], "length": ["ok", "OK"]}
    assert (report.cut, len(read(cut_path(output)))) == (2, 1)
    assert all(len(text) + GREEDY.max_new_tokens <= longest for batch in target.batches for text in batch)


def test_template_variables_reach_the_template(tmp_path):
    target = Echo()
    settings = RegenerateSettings(GREEDY, template={"hint": "!"})
    regenerate([row("a")], target, TOKENIZER, settings, tmp_path / "out.jsonl")
    assert target.batches == [["<user>a</><assistant>!"]]


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WITH_TOOLS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "two", "tool_call_id": "c1"},
    {"role": "tool", "content": "three"},
    {"role": "assistant", "content": "of another model"},
    {"role": "user", "content": "b"},
]


def test_calls_and_results_of_tools_stay_and_texts_are_made_anew(tmp_path):
    target = Echo()
    prompts = [{"messages": WITH_TOOLS, "tools": [{"name": "add"}]}, {"messages": WITH_TOOLS}]
    report = regenerate(prompts, target, TOKENIZER, RegenerateSettings(GREEDY), tmp_path / "out.jsonl")
    asked = "<user>a</><assistant></><tool>two</><tool>three</><assistant>"
    assert target.batches == [[asked] * 2, [f"{asked}A</><user>b</><assistant>"] * 2]
    assert report.written == 2 and report.repeated == 0
    for made in read(tmp_path / "out.jsonl"):
        assert [turn["content"] for turn in made["messages"]] == ["a", "", "two", "three", "A", "b", "B"]
        assert made["messages"][1:4] == WITH_TOOLS[1:4]
        assert made["answer_tokens"] == [1, 1]


def test_a_question_that_does_not_fit_goes_with_its_tool_turns(tmp_path):
    longest = len("<user>b</><assistant>B</>") + GREEDY.max_new_tokens
    prompt = {"messages": [{"role": "user", "content": "b"}, *WITH_TOOLS[:4]]}
    settings = RegenerateSettings(GREEDY, cut="mark", max_context_tokens=longest)
    regenerate([prompt], Echo(), TOKENIZER, settings, tmp_path / "out.jsonl")
    assert [turn["content"] for turn in read(tmp_path / "out.jsonl")[0]["messages"]] == ["b", "B"]


def test_too_long_questions_do_not_count_as_answered(tmp_path):
    output = tmp_path / "out.jsonl"
    small = RegenerateSettings(GREEDY, max_context_tokens=1)
    assert regenerate([row("a")], Echo(), TOKENIZER, small, output).written == 0
    with pytest.raises(DataError, match="max_context_tokens 1 there, None asked"):
        regenerate([row("a")], Echo(), TOKENIZER, RegenerateSettings(GREEDY), output)


def test_a_row_sets_its_own_template_variables(tmp_path):
    target = Echo()
    settings = RegenerateSettings(GREEDY, template={"hint": "!"})
    prompts = [row("a", chat_template_kwargs={"hint": "?"}), row("b")]
    regenerate(prompts, target, TOKENIZER, settings, tmp_path / "out.jsonl")
    assert target.batches == [["<user>a</><assistant>?", "<user>b</><assistant>!"]]


def test_a_row_that_the_template_refuses_is_passed_over(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    )
    report = regenerate([row("bad"), row("a")], Echo(), tokenizer, RegenerateSettings(GREEDY), tmp_path / "out.jsonl")
    assert report.written == 1 and len(report.refused) == 1 and "the chat template refuses it (no)" in report.refused[0]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sampling": Sampling(max_new_tokens=8, temperature=0.5)}, r"sampling .* there, .*0\.5.* asked"),
        ({"model": "another"}, "model mine there, another asked"),
        ({"template": {"enable_thinking": False}}, r"template \{\} there, \{'enable_thinking': False\} asked"),
    ],
)
def test_an_output_of_other_settings_is_refused(tmp_path, changed, words):
    output = tmp_path / "out.jsonl"
    settings = RegenerateSettings(GREEDY, model="mine")
    regenerate([row("a")], Echo(), TOKENIZER, settings, output)
    with pytest.raises(DataError, match=rf"out\.jsonl:1: answered otherwise \({words}\); choose another output"):
        regenerate([row("b")], Echo(), TOKENIZER, replace(settings, **changed), output)
    assert len(read(output)) == 1


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ({"text": "a"}, "prompt 2: no `messages`"),
        ({"messages": []}, "prompt 2: no `messages`"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "prompt 2, message 0: role 'tool'"),
        ({"messages": [{"role": "user", "content": "a"}, WITH_TOOLS[1]]}, "prompt 2: no user message"),
        ({"messages": [{"role": "user", "content": None}]}, "prompt 2, message 0: role 'user'"),
        ({"messages": ["a"]}, "prompt 2, message 0: role None"),
        ({"messages": [{"role": "system", "content": "a"}]}, "prompt 2: no user message"),
    ],
)
def test_rows_that_are_no_prompts_are_named(tmp_path, prompt, error):
    with pytest.raises(DataError, match=error):
        regenerate([row("a"), prompt], Echo(), TOKENIZER, RegenerateSettings(GREEDY), tmp_path / "out.jsonl")


def test_a_file_that_is_no_output_is_refused(tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text('{"messages": []}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"out\.jsonl:1: not a row of an earlier run"):
        regenerate([row("a")], Echo(), TOKENIZER, RegenerateSettings(GREEDY), output)
    with pytest.raises(DataError, match="batch_size is 0"):
        regenerate([row("a")], Echo(), TOKENIZER, RegenerateSettings(GREEDY), tmp_path / "new.jsonl", 0)
