"""Answers over HTTP from a local server that fails in every way a server can."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.regenerate.client import Endpoint, regenerate_remote
from paceline.regenerate.loop import OpenConversation, RegenerateSettings, cut_path
from paceline.types import Sampling

SETTINGS = RegenerateSettings(Sampling(64))


def said(messages: list[dict[str, str]]) -> str:
    """The server's answer: a function of the whole conversation so far."""
    return "answer " + hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:12]


class Server(ThreadingHTTPServer):
    """Answers chat completions; `error(number, body)` may name a way to fail for a request."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, error: Callable[[int, dict[str, Any]], str | None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.error = error
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.release = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append(body)
        error = self.server.error(number, body)
        message = {"role": "assistant", "content": said(body["messages"]), "reasoning_content": "because"}
        choice = {"message": message, "finish_reason": "length" if error == "cut" else "stop"}
        data = json.dumps({"choices": [choice], "usage": {"completion_tokens": 7}}).encode()
        if error in (None, "cut"):
            self._send(200, data)
        elif error == "truncated":
            self._send(200, data[: len(data) // 2], length=len(data))
            self.close_connection = True
        elif error == "half":
            self._send(200, data[: len(data) // 2])
        elif error == "gone":
            self.close_connection = True
        elif error == "silent":
            self.server.release.wait()
            self.close_connection = True
        else:
            self._send(int(error), b'{"error": "no"}')

    def _send(self, code: int, data: bytes, length: int | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        if code == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    running: list[Server] = []

    def start(error: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None) -> Server:
        server = Server(error)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.release.set()
        server.shutdown()
        server.server_close()


def asked(number: int, turns: int = 1) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"question {number}.{turn}"} for turn in range(turns)],
        "tags": [f"t{number}"],
    }


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {row["messages"][0]["content"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def endpoint(server: Server, **more: Any) -> Endpoint:
    return Endpoint(server.url, **{"in_flight": 4, "timeout_s": 20.0, "first_pause_s": 0.001, "attempts": 4, **more})


def test_every_prompt_is_answered_turn_by_turn(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve()
    prompts = [asked(number, turns=1 + number % 3) for number in range(20)]
    settings = RegenerateSettings(Sampling(64, 0.7, 5, 0.9, 3), template={"enable_thinking": False})
    done: list[int] = []
    made = regenerate_remote([*prompts, prompts[0]], endpoint(server), settings, tmp_path / "out.jsonl", done.append)
    assert (made.counts.written, made.counts.repeated, made.retries, made.refused) == (20, 1, 0, [])
    assert sum(done) == 20 and made.counts.answer_tokens == 7 * sum(len(prompt["messages"]) for prompt in prompts)
    rows = rows_of(tmp_path / "out.jsonl")
    for number, prompt in enumerate(prompts):
        row = rows[f"question {number}.0"]
        sent: list[dict[str, str]] = []
        for turn, message in enumerate(prompt["messages"]):
            sent.append(message)
            assert row["messages"][2 * turn] == message
            assert row["messages"][2 * turn + 1] == {
                "role": "assistant",
                "content": said(sent),
                "reasoning_content": "because",
            }
            sent.append({"role": "assistant", "content": said(sent)})
        assert row["tags"] == prompt["tags"] and row["model"] == "tiny" and row["finish_reason"] == "stop"
        assert row["sampling"] == {"max_new_tokens": 64, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3}
    body = server.bodies[0]
    assert {key: body[key] for key in ("model", "max_tokens", "temperature", "top_p", "seed", "top_k")} == {
        "model": "tiny",
        "max_tokens": 64,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 3,
        "top_k": 5,
    }
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_reasoning_and_tool_turns_follow_the_protocol(tmp_path: Path, serve: Callable[..., Server]) -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "of another model"},
        {"role": "user", "content": "more"},
    ]
    for send in (True, False):
        server = serve()
        settings = RegenerateSettings(Sampling(64), send_reasoning=send)
        out = tmp_path / f"{send}.jsonl"
        prompt = {"messages": turns, "tools": [{"type": "function"}], "chat_template_kwargs": {"x": 1}}
        made = regenerate_remote([prompt], endpoint(server), settings, out)
        assert made.counts.written == 1 and made.refused == []
        first, second = server.bodies
        assert [turn["role"] for turn in first["messages"]] == ["user", "assistant", "tool"]
        assert first["messages"][1]["tool_calls"] == [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
        ]
        assert first["messages"][2] == turns[2]
        assert first["tools"] == [{"type": "function"}] and first["chat_template_kwargs"] == {"x": 1}
        assert [turn["role"] for turn in second["messages"]] == ["user", "assistant", "tool", "assistant", "user"]
        assert second["messages"][3]["content"] == said(first["messages"])
        assert second["messages"][3].get("reasoning_content") == ("because" if send else None)
        kept = rows_of(out)["question"]["messages"]
        assert kept[:3] == turns[:3] and kept[3]["reasoning_content"] == "because"


def test_turns_that_do_not_fit_are_not_asked(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve()
    settings = RegenerateSettings(Sampling(10), max_context_tokens=13, cut="mark")
    prompts = [asked(number, turns=1 + number) for number in range(3)]
    with pytest.raises(DataError, match="needs count_tokens"):
        regenerate_remote(prompts, endpoint(server), settings, tmp_path / "out.jsonl")

    def count(conversation: OpenConversation) -> int:
        if conversation.said[0]["content"] == "question 0.0":
            raise DataError("the chat template refuses it")
        return len(conversation.said)

    made = regenerate_remote(prompts, endpoint(server), settings, tmp_path / "out.jsonl", count_tokens=count)
    assert made.refused == ["the chat template refuses it"] and (made.counts.written, made.counts.cut) == (2, 1)
    rows = rows_of(tmp_path / "out.jsonl")
    assert [len(rows[f"question {number}.0"]["messages"]) for number in (1, 2)] == [4, 4]
    assert rows["question 2.0"]["finish_reason"] == "length" and len(server.bodies) == 4


@pytest.mark.parametrize("error", ["429", "500", "503", "truncated", "half", "gone"])
def test_what_passes_is_tried_again(error: str, tmp_path: Path, serve: Callable[..., Server]) -> None:
    seen: Counter[str] = Counter()

    def fails_twice(number: int, body: dict[str, Any]) -> str | None:
        key = body["messages"][0]["content"]
        seen[key] += 1
        return error if seen[key] <= 2 else None

    made = regenerate_remote(
        [asked(number) for number in range(6)], endpoint(serve(fails_twice)), SETTINGS, tmp_path / "out.jsonl"
    )
    assert made.counts.written == 6 and made.retries == 12 and set(seen.values()) == {3}
    assert all(row["messages"][1]["content"].startswith("answer ") for row in rows_of(tmp_path / "out.jsonl").values())


def test_an_answer_that_does_not_come_is_asked_for_again(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve(lambda number, body: "silent" if number == 0 else None)
    made = regenerate_remote([asked(0)], endpoint(server, timeout_s=0.3), SETTINGS, tmp_path / "out.jsonl")
    assert made.counts.written == 1 and made.retries == 1


def test_answers_before_a_dead_server_are_kept(tmp_path: Path, serve: Callable[..., Server]) -> None:
    prompts = [asked(number) for number in range(30)]
    dying = serve(lambda number, body: "gone" if number >= 10 else None)
    with pytest.raises(DataError, match=r"failed 4 times in a row.*run the same command to go on") as error:
        regenerate_remote(prompts, endpoint(dying), SETTINGS, tmp_path / "out.jsonl")
    assert len(error.value.errors) == 1
    kept = rows_of(tmp_path / "out.jsonl")
    assert len(kept) == 10
    made = regenerate_remote(prompts[::-1], endpoint(serve()), SETTINGS, tmp_path / "out.jsonl")
    assert (made.counts.written, made.counts.already_there) == (20, 10)
    assert set(rows_of(tmp_path / "out.jsonl")) == {f"question {number}.0" for number in range(30)}


def test_refused_and_cut_rows_are_counted_and_told(tmp_path: Path, serve: Callable[..., Server]) -> None:
    def error(number: int, body: dict[str, Any]) -> str | None:
        return {"question 1.0": "400", "question 2.0": "cut"}.get(body["messages"][0]["content"])

    made = regenerate_remote(
        [asked(number) for number in range(4)], endpoint(serve(error)), SETTINGS, tmp_path / "out.jsonl"
    )
    assert made.counts.written == 2 and made.counts.cut == 1 and made.retries == 0
    assert len(made.refused) == 1 and "HTTP 400" in made.refused[0]
    assert rows_of(cut_path(tmp_path / "out.jsonl"))["question 2.0"]["finish_reason"] == "length"


def test_what_cannot_pass_stops_at_once(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve(lambda number, body: "401")
    with pytest.raises(DataError, match=r"HTTP 401 .*check the address, the model and the key"):
        regenerate_remote([asked(0)], endpoint(server), SETTINGS, tmp_path / "out.jsonl")
    assert len(server.bodies) == 1
    with pytest.raises(DataError, match="no address of a server"):
        regenerate_remote([asked(0)], Endpoint("localhost:8000"), SETTINGS, tmp_path / "out.jsonl")
