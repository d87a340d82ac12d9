"""Answers of a real server of the OpenAI protocol, `transformers serve`, are those of the target in this process."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.import_utils import is_serve_available

from paceline.cli import main

pytestmark = [
    pytest.mark.skipif(
        not is_serve_available(),
        reason="`transformers serve` needs fastapi, uvicorn and openai, which are not installed",
    ),
    pytest.mark.timeout(900),
]
PATIENCE_S = 240.0
POLL_S = 0.5


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.fixture
def served(demo_assets: Path, tmp_path: Path) -> Iterator[str]:
    """Address of a server of the embedded target, which ends with the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", str(demo_assets / "target"), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--device", "cpu", "--dtype", "float32"]
    log = tmp_path / "server.log"
    with log.open("wb") as said:
        server = subprocess.Popen(
            [sys.executable, "-c", "from transformers.cli.transformers import main; main()", *words],
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    try:
        for _ in range(int(PATIENCE_S / POLL_S)):
            if healthy(port):
                break
            try:
                code = server.wait(POLL_S)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail(f"the server ended with {code}: {log.read_text(encoding='utf-8')[-2000:]}")
        else:
            pytest.fail(f"no answer in {PATIENCE_S} s: {log.read_text(encoding='utf-8')[-2000:]}")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def answers(path: Path) -> dict[str, tuple[list[str], str]]:
    """Texts and finish reason by row; white space at the end of a cut answer is what this server leaves out."""
    found: dict[str, tuple[list[str], str]] = {}
    for row in (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()):
        texts = [turn["content"] for turn in row["messages"]]
        if row["finish_reason"] == "length":
            texts[-1] = texts[-1].rstrip()
        found[row["id"]] = (texts, row["finish_reason"])
    return found


def test_a_server_gives_the_answers_of_the_target_in_process(
    served: str,
    demo_assets: Path,
    tmp_path: Path,
    write_rows: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = (demo_assets / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    chats = sorted((json.loads(line)["messages"] for line in lines), key=lambda turns: len(turns[1]["content"]))
    # Two that end by themselves, and one that the limit cuts.
    rows: list[dict[str, Any]] = [{"messages": chats[place][:1]} for place in (0, 1, -1)]
    rows.append({"messages": [*rows[0]["messages"], *rows[1]["messages"]]})
    rows.append({"messages": [{"role": "user", "content": "long " * 400}]})
    target, prompts = str(demo_assets / "target"), write_rows(rows)
    common = [prompts, "--target", target, "--max-new-tokens", "24", "--cut", "mark", "--max-context", "400", "--json"]
    for name, way in (("local", ["--local"]), ("served", ["--endpoint", served, "--model", target])):
        assert main(["regenerate", *common, *way, "--out", str(tmp_path / f"{name}.jsonl")]) == 0
        assert json.loads(capsys.readouterr().out)["passed_over"] == 0
    local, remote = answers(tmp_path / "local.jsonl"), answers(tmp_path / "served.jsonl")
    assert remote == local and sorted(reason for _, reason in local.values()) == ["length", "stop", "stop", "stop"]
    assert max(len(turns) for turns, _ in local.values()) == 4
