"""Rows, templates and tokenizers that look right and would train wrongly: each is set aside, told, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import template_families as families
from paceline.config import DataConfig
from paceline.data.chat_template import Renderer
from paceline.data.encoder import Encoder
from paceline.data.files import find_files
from paceline.data.loss_mask import samples_of
from paceline.data.prepare import prepare
from paceline.data.report import PrepareReport
from paceline.data.rows import Conversation, RowRejected, read_row
from paceline.data.store import open_store
from paceline.data.tokenizer import load_tokenizer
from paceline.drafter.anchors import count_eligible
from paceline.errors import DataError, TargetError
from template_families import Family

Folder = Callable[[Family], str]
Write = Callable[..., str]


def call(name: str = "add", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def chat(question: str, answer: str, calls: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": answer, **more} | ({"tool_calls": calls} if calls else {})
    return {"messages": [{"role": "user", "content": question}, said]}


def run(files: str | list[str], store: Path, tokenizer: str, **settings: Any) -> PrepareReport:
    names = [files] if isinstance(files, str) else files
    return prepare(names, store, tokenizer, DataConfig(**settings), count_eligible=count_eligible)


def supervised(row: dict[str, Any], folder: str) -> list[str]:
    """Supervised texts of the only sample of a row."""
    tokenizer = load_tokenizer(folder)
    conversation = read_row(row)
    assert isinstance(conversation, Conversation)
    (sample,) = samples_of(conversation, Renderer(tokenizer), Encoder(tokenizer, [" a"]))
    spans = sample.spans.reshape(-1, 2).tolist()
    return [tokenizer.decode(sample.ids[a:b].tolist(), skip_special_tokens=False) for a, b in spans]


def reason(row: dict[str, Any], folder: str) -> tuple[str, str]:
    """Why a row is set aside, and what was found."""
    with pytest.raises(RowRejected) as found:
        supervised(row, folder)
    return found.value.reason, found.value.detail


@pytest.mark.parametrize(
    "calls", [[call(text="stop <|im_end|> here")], [call("a<|im_end|>b")], [call(), call(**{"<|im_end|>": 1})]]
)
@pytest.mark.parametrize("family", [families.TOOLS, families.THINKING])
def test_an_end_token_inside_a_call_does_not_cut_the_answer(
    family: Family, calls: list[dict[str, Any]], family_folder: Folder
) -> None:
    found = reason(chat("Hi", "", calls, reasoning_content="think"), family_folder(family))
    assert found[0] == "end_token_inside" and "turn 1: '<|im_end|>' comes before" in found[1]


def test_rows_with_such_calls_are_told_by_line(tmp_path: Path, family_folder: Folder, write_rows: Write) -> None:
    rows = write_rows([chat("Hi", "", [call(a=1)]), chat("Hi", "", [call(a="<|im_end|>")])])
    report = run(rows, tmp_path / "store", family_folder(families.TOOLS))
    assert report.samples == 1 and report.set_aside["end_token_inside"].example.endswith("rows.jsonl:2")


RAW = families.ALWAYS_THINKS


@pytest.mark.parametrize("answer", ["s", "stop", "t", "|", "op|>", "asks", "a", "<"])
def test_short_answers_are_not_found_in_the_template(answer: str, family_folder: Folder) -> None:
    row = chat("Hi", answer, reasoning_content="greet")
    assert supervised(row, family_folder(RAW)) == [f"greet\n</think>\n\n{answer}<|stop|>"]


CALLING = replace(
    RAW,
    name="generation prompt opens a thought, calls",
    template=RAW.template.replace(
        " | trim + eos_token }}",
        " | trim }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson }}{% endfor %}{{ eos_token }}",
    ),
)


@pytest.mark.parametrize("answer", ["It is here.", "a", "call", "asks", ""])
def test_an_answer_before_calls_is_placed_exactly(answer: str, family_folder: Folder) -> None:
    found = supervised(chat("Hi", answer, [call(a=1)], reasoning_content="greet"), family_folder(CALLING))
    assert found == [f'greet\n</think>\n\n{answer}<call>{{"name": "add", "arguments": {{"a": 1}}}}<|stop|>']


@pytest.mark.parametrize("answer", ["", "I look it up."])
def test_calls_that_the_template_leaves_out_are_no_answer(answer: str, family_folder: Folder) -> None:
    found = reason(chat("Hi", answer, [call(a=1)]), family_folder(families.CHATML))
    assert found[0] == "not_written" and "turn 1: the chat template does not write a call of add" in found[1]


def test_nulls_of_other_rows_do_not_reach_the_template(
    tmp_path: Path, family_folder: Folder, write_rows: Write
) -> None:
    from datasets import Dataset

    tools = [
        {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "int"}}}},
        {"type": "function", "function": {"name": "say", "parameters": {"b": {"type": "str", "enum": ["x"]}}}},
    ]
    rows = [
        chat("Hi", "", [call(a=1), call("say", b={"x": [{"y": 1}, {"z": 2}]})]) | {"tools": tools},
        chat("Hi", "", [call("say", b={"w": "2"})]) | {"tools": tools[:1]},
    ]
    folder = family_folder(families.TOOLS)
    run(write_rows(rows), tmp_path / "lines", folder)
    Dataset.from_list(rows).save_to_disk(tmp_path / "set")
    pq.write_table(Dataset.from_list(rows).data.table, tmp_path / "rows.parquet")
    for name in ("set", "rows.parquet"):
        run(str(tmp_path / name), tmp_path / f"store of {name}", folder)
        one, other = open_store(tmp_path / "lines"), open_store(tmp_path / f"store of {name}")
        texts = [[load_tokenizer(folder).decode(store.read([k])[0][0]) for k in (0, 1)] for store in (one, other)]
        assert "null" not in str(texts) and texts[0] == texts[1]


def test_a_folder_of_several_splits_is_refused(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    splits = {name: Dataset.from_list([chat("Hi", "Hello there.")]) for name in ("train", "test")}
    DatasetDict(splits).save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match="name the folder of one split"):
        find_files([str(tmp_path / "set")])
    assert len(find_files([str(tmp_path / "set" / "train")])) == 1


def test_lines_nested_too_deeply_are_set_aside(tmp_path: Path, family_folder: Folder, write_rows: Write) -> None:
    deep = "[" * 3000 + "]" * 3000
    arguments = json.dumps({"function": {"name": "f", "arguments": '{"a": ' + deep + "}"}})
    called = (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [' + arguments + "]}]}"
    )
    rows = write_rows([chat("Hi", "Hello."), '{"messages": ' + deep + "}", called])
    report = run(rows, tmp_path / "store", family_folder(families.TOOLS))
    assert report.samples == 1 and report.set_aside["invalid_json"].detail.startswith("nested too deeply")
    assert report.set_aside["invalid_json"].example.endswith(":2")
    assert report.set_aside["wrong_roles"].example.endswith(":3")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"eos_token_id": "</s>"}', "eos_token_id holds '</s>', which is not a token"),
        ('{"eos_token_id": [1, null]}', "eos_token_id holds None"),
        ('{"eos_token_id": [1, 1.5]}', "eos_token_id holds 1.5"),
        ('{"eos_token_id": true}', "eos_token_id holds True"),
        ('{"eos_token_id": 999999}', "eos_token_id holds 999999"),
        ('{"eos_token_id": -1}', "eos_token_id holds -1"),
        ("[]", "holds a list instead of an object"),
        ("{", "not readable as JSON"),
    ],
)
def test_end_tokens_that_are_none_are_refused_in_one_line(
    config: str, words: str, tmp_path: Path, chatml: str, write_rows: Write
) -> None:
    shutil.copytree(chatml, tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text(config, encoding="utf-8")
    with pytest.raises(TargetError) as error:
        run(write_rows([chat("Hi", "Hello.")]), tmp_path / "store", str(tmp_path / "target"))
    assert len(error.value.errors) == 1 and "\n" not in str(error.value)
    assert words in str(error.value) and "generation_config.json" in str(error.value)


def with_template(folder: str, at: Path, template: str) -> str:
    """A copy of a target with another chat template."""
    shutil.copytree(folder, at)
    (at / "chat_template.jinja").write_text(template, encoding="utf-8")
    return str(at)


def test_a_template_without_a_generation_prompt_is_told(
    tmp_path: Path, chatml: str, family_folder: Folder, write_rows: Write
) -> None:
    silent = families.CHATML.template.replace("if add_generation_prompt", "if false and add_generation_prompt")
    rows = write_rows([chat("Hi", "Hello."), chat("Hi", "Hello. ")])
    report = run(rows, tmp_path / "store", with_template(chatml, tmp_path / "target", silent))
    assert report.notes["header_supervised"].count == 2
    assert any("no generation prompt: the header of the answer is supervised" in line for line in report.warnings)
    # Templates whose answers follow the question directly need none.
    assert not run(rows, tmp_path / "other", family_folder(families.INSTRUCT)).notes


def test_a_broken_template_is_one_line(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    broken = with_template(chatml, tmp_path / "target", families.CHATML.template + "\n{% if %}")
    with pytest.raises(DataError, match="line 2 of its chat template is broken: Expected") as error:
        run(write_rows([chat(f"Hi {n}", "Hello.") for n in range(3)]), tmp_path / "store", broken)
    assert (
        len(error.value.errors) == 1 and "\n" not in str(error.value) and str(tmp_path / "target") in str(error.value)
    )


def test_held_out_text_and_tokens_are_left_out_and_told(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    tokens = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    mine = [{"text": f"text number {n}"} for n in range(6)] + [tokens, {**tokens, "input_ids": [5, 6, 7, 9]}]
    mine.append(chat("question", "answer"))
    ids = load_tokenizer(chatml).encode("text number 2")
    held = write_rows([{"text": "text number 4"}, tokens, {"input_ids": ids, "loss_mask": [0] * len(ids)}], "h.jsonl")
    chats = write_rows([chat("question", "other")], "chats.jsonl")
    report = run(write_rows(mine), tmp_path / "store", chatml, heldout=[held, chats])
    assert report.set_aside["heldout"].count == 4 and report.samples == 5
    (told,) = [line for line in report.warnings if "h.jsonl" in line]
    assert "holds no chat" in told and "the same tokens" in told and "evaluate" in told
    assert not any("chats.jsonl" in line for line in report.warnings)
    with pytest.raises(DataError, match=r"e\.jsonl: no row that can be read"):
        run(write_rows(mine), tmp_path / "other", chatml, heldout=[write_rows([{"a": 1}], "e.jsonl")])
