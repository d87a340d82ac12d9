"""`paceline regenerate` asks a real vLLM server: the target's own answers with their token ids, and a killed server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import DataError
from paceline.regenerate.client import Endpoint, answers_of
from paceline.regenerate.loop import RegenerateSettings, regenerate
from paceline.types import Sampling
from processes import free_port

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]
NUM_PROMPTS, MAX_TOKENS = 8, 24


@pytest.fixture(scope="module")
def questions(tmp_path_factory, demo_assets: Path) -> Path:
    lines = (demo_assets / "heldout.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    path.write_text("".join(json.dumps({"messages": json.loads(line)["messages"][:1]}) + "\n" for line in lines))
    return path


def rows(path: Path) -> dict[str, dict]:
    return {row["prompt_hash"]: row for row in map(json.loads, path.read_text().splitlines())}


@pytest.mark.parametrize("thinking", ["off", "on"])
def test_answers_of_vllm_are_those_of_this_process(run_dir, server, questions, tmp_path, thinking) -> None:
    target = str(run_dir.parent / "target")
    words = ["regenerate", str(questions), "--target", target, "--max-new-tokens", str(MAX_TOKENS), "--cut", "mark"]
    words += ["--thinking", thinking]
    theirs, ours = tmp_path / "theirs.jsonl", tmp_path / "ours.jsonl"
    assert main([*words, "--out", str(theirs), "--endpoint", f"{server}/v1", "--in-flight", "4"]) == 0
    assert main([*words, "--out", str(ours), "--local"]) == 0
    found, expected, tokenizer = rows(theirs), rows(ours), load_tokenizer(target)
    assert found.keys() == expected.keys() and len(found) == NUM_PROMPTS
    for name, row in found.items():
        other = expected[name]
        assert row["template"] == other["template"] == {"enable_thinking": thinking == "on"}
        answer, own = row["messages"][-1], other["messages"][-1]
        assert answer["token_ids"] == own["token_ids"]
        # A cut answer may end inside a character; servers leave that part out, and special tokens.
        content = tokenizer.decode(own["token_ids"], skip_special_tokens=True)
        assert answer["content"].rstrip("\ufffd") == content.rstrip("\ufffd")
        assert row["finish_reason"] == other["finish_reason"] and row["answer_tokens"] == other["answer_tokens"]


def test_a_killed_server_loses_and_doubles_no_answer(serving, run_dir, questions, tmp_path) -> None:
    prompts = [json.loads(line) for line in questions.read_text().splitlines()]
    settings = RegenerateSettings(Sampling(MAX_TOKENS), cut="mark")
    out, port = tmp_path / "out.jsonl", free_port()
    endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", in_flight=2, attempts=2, first_pause_s=0.1)
    with serving("--plain", port=port) as (process, _, _):
        done: list[None] = []

        def progress() -> None:
            done.append(None)
            if len(done) == 3:
                process.terminate()
                process.wait(60)

        answers, named = answers_of(endpoint, settings)
        with pytest.raises(DataError, match=r"failed 2 times in a row, .*run the same command to resume"):
            regenerate(prompts, answers, named, out, progress=progress)
    before = rows(out)
    assert 3 <= len(before) < NUM_PROMPTS
    with serving("--plain", port=port):
        answers, named = answers_of(endpoint, settings)
        report = regenerate(prompts, answers, named, out)
    lines = out.read_text().splitlines()
    assert len(lines) == len(rows(out)) == NUM_PROMPTS and report.written == NUM_PROMPTS - len(before)
    assert [json.loads(line) for line in lines[: len(before)]] == list(before.values())
