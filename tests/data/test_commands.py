"""`paceline prepare` as a person runs it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.cli.prepare import draw_sample
from paceline.data.store import open_store
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import DataError
from paceline.evaluate.prompts import PromptRenderer, render_prompts

Write = Callable[..., str]


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


@pytest.fixture
def settings(tmp_path: Path, chatml: str, write_rows: Write) -> str:
    rows = [chat(f"question {n}", f"The answer is {n}.") for n in range(5)]
    data = write_rows([*rows, "{broken", rows[0]])
    file = tmp_path / "run.yaml"
    file.write_text(
        f"run_dir: {tmp_path / 'run'}\ntarget: {{path: {chatml}}}\ndata: {{train: ['{data}']}}\n", encoding="utf-8"
    )
    return str(file)


def test_prepare_prints_what_it_did_and_what_it_left_out(settings: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", settings]) == 0
    text = capsys.readouterr().out
    assert "run/store: written" in text
    assert "7 in, 5 used, 5 samples" in text
    assert "1  not valid JSON  (first: " in text and "rows.jsonl:6:" in text
    assert re.search(
        r"1  the same tokens came earlier, \d+ supervised tokens \(17 %\)  \(first: .*rows.jsonl:7\)", text
    )
    assert "warning: 2 of 7 rows (29%) are not used" in text
    assert "100.0% of the labels in a block" in text
    assert "5 rows × 6 epochs = 30 rows trained, less than 0.1% of the smallest recipe" in " ".join(text.split())
    assert main(["prepare", settings]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["prepare", settings, "--data.max_length", "50"]) == 1
    assert "data.max_length 4096 there, 50 asked" in capsys.readouterr().err
    assert main(["prepare", settings, "--data.max_length", "50", "--replace"]) == 0


def test_prepare_gives_json_to_programs(settings: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", settings, "--json", "--show", "2", "--drafter.num_anchors", "3"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err.count("⟦") == 2
    assert found["samples"] == 5 and found["set_aside"]["invalid_json"]["count"] == 1
    assert found["anchors"]["anchors"] == 15 and found["anchors"]["capped_samples"] == 5
    assert found["reused"] is False


def test_samples_are_drawn_with_what_is_supervised(
    settings: str, tmp_path: Path, chatml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", settings, "--show", "2"]) == 0
    text = capsys.readouterr().out
    assert text.count("⟦") == 2 and "question 0<|im_end|>\n<|im_start|>assistant\n⟦The answer is 0.<|im_end|>⟧" in text
    drawn = draw_sample(open_store(tmp_path / "run" / "store"), 1, load_tokenizer(chatml))
    supervised = [drawn.plain[span.start : span.end] for span in drawn.spans if "green" in str(span.style)]
    assert supervised == ["⟦The answer is 1.<|im_end|>⟧"]


@pytest.mark.parametrize(("content", "words"), [("", "the file is empty"), ("{broken\n", "none can be trained on")])
def test_prepare_fails_in_one_line(
    content: str, words: str, settings: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(content, encoding="utf-8")
    assert main(["prepare", settings]) == 1
    err = capsys.readouterr().err
    assert words in err and len(err.strip().splitlines()) == 1


def test_prompts_are_rendered_as_they_are_served(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    two = {"id": 7, "messages": [*chat("a", "b")["messages"], *chat("c", "d", tags=["x"])["messages"]], "tags": ["x"]}
    rows = write_rows([two, {"prompt": "only asked"}, {"text": "no chat"}, "{broken", chat("last", "answer")])
    renderer = PromptRenderer(chatml)
    prompts = render_prompts([rows], renderer, None)
    tokenizer = load_tokenizer(chatml)
    assert [prompt.reference for prompt in prompts] == ["d", None, "answer"]
    assert prompts[0].id == "7" and prompts[1].id == f"{rows}:2" and "x" in prompts[0].tags
    served = tokenizer.apply_chat_template(two["messages"][:3], add_generation_prompt=True, return_dict=False)
    assert prompts[0].ids == served and tokenizer.decode(served) == prompts[0].text
    assert len(render_prompts([rows], renderer, 2)) == 2
    with pytest.raises(DataError, match="no row with a question to evaluate; for example"):
        render_prompts([write_rows([{"text": "no chat"}], "other.jsonl")], renderer, None)


def test_own_answers_are_told_from_others(
    tmp_path: Path, demo_assets: Path, capsys: pytest.CaptureFixture[str], write_rows: Write
) -> None:
    own = demo_assets / "heldout.jsonl"
    rows = [json.loads(line) for line in own.read_text(encoding="utf-8").splitlines()][:12]
    for row in rows:
        row["messages"] = [{**turn, "content": turn["content"][::-1]} for turn in row["messages"]]
    shares: dict[str, dict[str, float]] = {}
    for name, file in (("own", str(own)), ("other", write_rows(rows))):
        settings = tmp_path / f"{name}.yaml"
        settings.write_text(
            f"run_dir: {tmp_path / name}\ntarget: {{path: {demo_assets / 'target'}, dtype: float32}}\n"
            f"data: {{train: ['{file}']}}\n",
            encoding="utf-8",
        )
        assert main(["prepare", str(settings), "--on-policy", "12", "--json"]) == 0
        shares[name] = json.loads(capsys.readouterr().out)["on_policy"]
    assert shares["own"]["greedy_share"] > 0.97 and "own greedy ones" in str(shares["own"]["sentence"])
    assert shares["other"]["greedy_share"] < 0.6 and "written by another model" in str(shares["other"]["sentence"])
    assert shares["own"]["tau_ceiling"] > 2 * shares["other"]["tau_ceiling"]
    assert shares["own"]["mean_nll"] < shares["other"]["mean_nll"]
