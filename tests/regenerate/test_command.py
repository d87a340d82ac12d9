"""`paceline regenerate` as a person runs it, and what `paceline prepare` makes of its rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.config import DataConfig
from paceline.data.rows import Conversation, read_row
from paceline.data.tokenize_rows import RowTokenizer
from template_constructs import CONSTRUCTS

Write = Callable[..., str]


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_target_answers_in_this_process(
    tmp_path: Path, demo_assets: Path, capsys: pytest.CaptureFixture[str], write_rows: Write
) -> None:
    target = str(demo_assets / "target")
    prompts = write_rows([{"prompt": "What is 2 + 2?"}, {"text": "no chat"}, chat("Hello", "made anew")])
    words = ["regenerate", prompts, "--target", target, "--local", "--out", str(tmp_path / "out.jsonl")]
    words += ["--max-new-tokens", "24", "--cut", "mark"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["written"] == 2 and found["passed_over"] == 1
    rows = read(tmp_path / "out.jsonl")
    assert [row["messages"][0]["content"] for row in rows] == ["What is 2 + 2?", "Hello"]
    assert all(row["messages"][1]["content"] != "made anew" for row in rows)
    assert main(words) == 0
    assert "0 rows added, 2 were there" in capsys.readouterr().out


def test_one_way_to_answer_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["regenerate", "p.jsonl", "--target", "t", "--out", str(tmp_path / "o.jsonl")]
    for more in ([], ["--local", "--endpoint", "http://localhost:1/v1"]):
        assert main([*words, *more]) == 2
        assert "give either --local or --endpoint URL" in capsys.readouterr().err


@pytest.fixture
def switched(demo_assets: Path, tmp_path: Path) -> str:
    """The embedded target with a chat template that has a switch for thinking."""
    folder = tmp_path / "target"
    shutil.copytree(demo_assets / "target", folder)
    (folder / "chat_template.jinja").write_text(
        next(construct.family.template for name, construct in CONSTRUCTS.items() if name.startswith("Qwen3:")),
        encoding="utf-8",
    )
    return str(folder)


def test_the_mode_of_the_answers_is_the_mode_of_training(switched: str, tmp_path: Path, write_rows: Write) -> None:
    prompts, prompt_of = write_rows([{"prompt": "What is 2 + 2?"}]), {}
    for thinking, variables in (("off", {"enable_thinking": False}), ("on", {"enable_thinking": True}), ("auto", {})):
        out = tmp_path / f"{thinking}.jsonl"
        words = ["regenerate", prompts, "--target", switched, "--local", "--out", str(out), "--thinking", thinking]
        assert main([*words, "--max-new-tokens", "12", "--cut", "mark"]) == 0
        (row,) = read(out)
        assert row["template"] == variables
        tokenizer = RowTokenizer(switched, False, DataConfig(thinking="on", on_cut_answer="keep"))
        (sample,) = tokenizer.samples(read_row(row))
        served = tokenizer.tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_dict=False, **variables
        )
        prompt_of[thinking] = served
        start, end = sample.spans.tolist()
        assert sample.ids[: len(served)].tolist() == served and start >= len(served)
        answer = [*row["messages"][1]["token_ids"], tokenizer.tokenizer.eos_token_id]
        assert sample.ids[start:end].tolist() in (answer, answer[:-1])
    assert prompt_of["off"] != prompt_of["on"] == prompt_of["auto"]


def test_rows_answered_here_are_prepared_with_the_same_tokens(
    demo_assets: Path, tmp_path: Path, write_rows: Write
) -> None:
    target, out = str(demo_assets / "target"), tmp_path / "out.jsonl"
    prompts = write_rows([{"prompt": f"What is {n} + 2?"} for n in range(4)])
    words = ["regenerate", prompts, "--target", target, "--local", "--out", str(out), "--temperature", "1"]
    assert main([*words, "--max-new-tokens", "24"]) == 0
    tokenizer = RowTokenizer(target, False, DataConfig())
    for row in read(out):
        conversation = read_row(row)
        assert isinstance(conversation, Conversation) and conversation.served
        (sample,) = tokenizer.samples(conversation)
        start, end = sample.spans.tolist()
        assert sample.ids[start:end].tolist() == [*row["messages"][1]["token_ids"], tokenizer.tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--thinking", "off"], "--thinking = off: the chat template of"),
        (["--template-switches", "effort: high"], "--template-switches: effort: the chat template of"),
        (["--template-switches", "high"], "--template-switches 'high': give names and values"),
    ],
)
def test_a_switch_without_effect_is_refused_before_any_work(
    more: list[str], said: str, demo_assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["regenerate", "p.jsonl", "--target", str(demo_assets / "target"), "--local", "--out", str(tmp_path / "o")]
    assert main([*words, *more]) == 2
    assert said in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "o").exists()


def test_an_address_with_a_password_is_not_shown(
    demo_assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], write_rows: Write
) -> None:
    words = ["regenerate", write_rows([{"prompt": "Hi"}]), "--target", str(demo_assets / "target")]
    words += ["--out", str(tmp_path / "o"), "--attempts", "1", "--endpoint", "http://ann:sesame@127.0.0.1:1/v1"]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "http://127.0.0.1:1/v1: failed 1 times" in " ".join(said.split()) and "sesame" not in said
