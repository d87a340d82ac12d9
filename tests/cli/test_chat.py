"""`paceline chat` on the embedded target, with a random drafter: what it writes is the target's own answer."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli import chat, command, main
from paceline.config import TargetConfig
from paceline.data.token_text import TokenText, text_pieces
from paceline.data.tokenizer import load_tokenizer
from paceline.decode.loop import greedy_decode
from paceline.target_model.load import load_target
from small_runs import export_random_drafter

QUESTION = "Describe the parameters of `json.dumps`: `obj`."


@pytest.fixture(scope="module")
def words(demo_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command with an exported random drafter of the embedded target."""
    target = str(demo_assets / "target")
    out = export_random_drafter(tmp_path_factory.mktemp("drafter") / "zlab", target)
    return ["chat", out, "--target", target, "--evaluate.max-new-tokens", "24"]


def own_answer(demo_assets: Path, messages: list[dict[str, str]]) -> str:
    """The target's greedy answer as text."""
    path = str(demo_assets / "target")
    tokenizer, target = load_tokenizer(path, False), load_target(TargetConfig(path=path), [1], "cpu", "float32")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    found = greedy_decode(target, ids, max_new_tokens=24, stop_ids=target.facts.eos_token_ids)
    return tokenizer.decode(found.ids, skip_special_tokens=True)


def test_a_prompt_is_answered_as_the_target_does(words: list[str], demo_assets: Path, capsys) -> None:
    assert main([*words[:2], QUESTION, *words[2:]]) == 0
    shown = capsys.readouterr()
    assert shown.out == own_answer(demo_assets, [{"role": "user", "content": QUESTION}]) + "\n"
    assert re.search(r"with the drafter +[\d.]+ tokens/s  τ [\d.]+  \d+ of 24 tokens were drafts", shown.err)
    assert re.search(r"target alone +[\d.]+ tokens/s  [\d.]+ x as fast with the drafter; the same answer", shown.err)


def test_trees_answer_alike(words: list[str], demo_assets: Path, capsys) -> None:
    tree = ["--evaluate.tree-budget", "8", "--no-compare"]
    assert main([*words[:2], QUESTION, *words[2:], *tree]) == 0
    shown = capsys.readouterr()
    assert shown.out == own_answer(demo_assets, [{"role": "user", "content": QUESTION}]) + "\n"
    assert "target alone" not in shown.err


def test_a_chat_remembers_its_turns(words: list[str], demo_assets: Path, monkeypatch, capsys) -> None:
    typed = iter([QUESTION, "And what is the shortest call?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main([*words, "--no-compare", "--system", "Be short."]) == 0
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}]
    first = own_answer(demo_assets, asked)
    asked += [{"role": "assistant", "content": first}, {"role": "user", "content": "And what is the shortest call?"}]
    assert capsys.readouterr().out == f"{first}\n{own_answer(demo_assets, asked)}\n"


def test_a_prompt_from_a_pipe(words: list[str], demo_assets: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION + "\n"))
    assert main([*words, "--no-compare"]) == 0
    assert capsys.readouterr().out == own_answer(demo_assets, [{"role": "user", "content": QUESTION}]) + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main(words) == 2
    assert "error: PROMPT: the pipe is empty" in capsys.readouterr().err


def test_accepted_drafts_are_in_color(demo_assets: Path, monkeypatch) -> None:
    """Of a pass's tokens the accepted drafts, not the target's own, and not a token that ends the answer."""
    tokenizer = load_tokenizer(str(demo_assets / "target"), False)
    ids = tokenizer.encode("def one(\n    two):\n", add_special_tokens=False)
    out = io.StringIO()
    monkeypatch.setattr(command, "stdout", Console(file=out, force_terminal=True, color_system="standard"))
    shown = chat._Shown(TokenText(tokenizer).add, frozenset({tokenizer.eos_token_id}))
    shown(ids[:1], 0)
    shown([*ids[1:], tokenizer.eos_token_id], len(ids) - 2)
    green = "".join(re.findall("\x1b\\[32m(.*?)\x1b\\[0m", out.getvalue()))
    pieces = text_pieces(tokenizer, ids)
    assert green == "".join(pieces[1:-1]).replace("\n", "") and shown.drafted == len(ids) - 2
    assert re.sub("\x1b\\[\\d+m", "", out.getvalue()) == shown.text == "def one(\n    two):\n"


def test_characters_that_span_tokens_come_whole(demo_assets: Path) -> None:
    tokenizer = load_tokenizer(str(demo_assets / "target"), False)
    ids = tokenizer.encode("a 漢字 é", add_special_tokens=False)
    text = TokenText(tokenizer)
    pieces = [text.add(token) for token in ids]
    assert "".join(pieces) == "a 漢字 é" and "" in pieces and not any("\ufffd" in piece for piece in pieces)
    cut = TokenText(tokenizer)
    for token in tokenizer.encode("漢", add_special_tokens=False)[:-1]:
        assert cut.add(token) == ""
    assert "\ufffd" in cut.rest() and cut.rest() == ""
