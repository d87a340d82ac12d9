"""Answers over HTTP from a local server that fails in every way a server can."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.regenerate.client import Client, Endpoint, answers_of
from paceline.regenerate.loop import RegenerateReport, RegenerateSettings, cut_path, regenerate
from paceline.types import JsonDict, Sampling

SETTINGS = RegenerateSettings(Sampling(64))


def answered(
    prompts: Iterable[dict[str, Any]], endpoint: Endpoint, settings: RegenerateSettings, output: Path, **more: Any
) -> RegenerateReport:
    """Answer prompts with a server."""
    answers, settings = answers_of(endpoint, settings, send_reasoning=more.pop("send_reasoning", False))
    return regenerate(prompts, answers, settings, output, **more)


def said(messages: list[dict[str, str]]) -> str:
    """The server's answer: a function of the whole conversation so far."""
    return "answer " + hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:12]


class Server(ThreadingHTTPServer):
    """Answers chat completions; `error(number, body)` may name a way to fail for a request, or give the reply.

    Attributes:
        ids: what becomes of `return_token_ids`: `ignored`, `refused` (HTTP 400) or `returned`.
        login: the Authorization header that is wanted; None = any.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, error: Callable[[int, dict[str, Any]], Any], ids: str = "ignored", login: str | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ids, self.login = ids, login
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

    def _logged_in(self) -> bool:
        wanted = self.server.login
        if wanted is None or self.headers["Authorization"] == wanted:
            return True
        self._send(401, b'{"error": "who are you"}')
        return False

    def do_GET(self) -> None:
        if not self._logged_in():
            return
        self._send(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._logged_in():
            return
        if "return_token_ids" in body and self.server.ids == "refused":
            self._send(400, b'{"error": "unknown field return_token_ids"}')
            return
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append(body)
        error = self.server.error(number, body)
        message = {"role": "assistant", "content": said(body["messages"]), "reasoning_content": "because"}
        choice: dict[str, Any] = {"message": message, "finish_reason": "length" if error == "cut" else "stop"}
        if body.get("return_token_ids") and self.server.ids == "returned":
            choice["token_ids"] = [5, 6, 7]
        data = json.dumps({"choices": [choice], "usage": {"completion_tokens": 7}}).encode()
        if error in (None, "cut"):
            self._send(200, data)
        elif isinstance(error, dict):
            self._send(200, json.dumps(error).encode())
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

    def start(error: Callable[[int, dict[str, Any]], Any] = lambda number, body: None, **more: Any) -> Server:
        server = Server(error, **more)
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
    return Endpoint(
        **{"url": server.url, "in_flight": 4, "timeout_s": 20.0, "first_pause_s": 0.001, "attempts": 4, **more}
    )


def test_every_prompt_is_answered_turn_by_turn(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve()
    prompts = [asked(number, turns=1 + number % 3) for number in range(20)]
    settings = RegenerateSettings(Sampling(64, 0.7, 5, 0.9, 3), template={"enable_thinking": False})
    done: list[int] = []
    made = answered(
        [*prompts, prompts[0]], endpoint(server), settings, tmp_path / "out.jsonl", progress=lambda: done.append(1)
    )
    assert (made.written, made.repeated, made.retries, made.refused) == (20, 1, 0, [])
    assert sum(done) == 21 and made.answer_tokens == 7 * sum(len(prompt["messages"]) for prompt in prompts)
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
        settings = RegenerateSettings(Sampling(64))
        out = tmp_path / f"{send}.jsonl"
        prompt = {"messages": turns, "tools": [{"type": "function"}], "chat_template_kwargs": {"x": 1}}
        made = answered([prompt], endpoint(server), settings, out, send_reasoning=send)
        assert made.written == 1 and made.refused == []
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


class Counting:
    """A tokenizer with one token a turn, and a template that refuses the first question."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **settings: Any) -> str:
        if conversation[0]["content"] == "question 0.0":
            raise TypeError("the chat template refuses it")
        return "." * len(conversation)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [0] * len(text)

    def decode(self, token_ids: Sequence[int], **settings: Any) -> str:
        raise AssertionError("nothing is decoded")


def test_turns_that_do_not_fit_are_not_asked(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve()
    settings = RegenerateSettings(Sampling(10), max_context_tokens=13, cut="mark")
    prompts = [asked(number, turns=1 + number) for number in range(3)]
    with pytest.raises(DataError, match="needs a tokenizer"):
        answered(prompts, endpoint(server), settings, tmp_path / "out.jsonl")
    made = answered(prompts, endpoint(server), settings, tmp_path / "out.jsonl", tokenizer=Counting())
    assert len(made.refused) == 1 and "the chat template refuses it" in made.refused[0]
    assert (made.written, made.cut) == (2, 1)
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

    made = answered(
        [asked(number) for number in range(6)], endpoint(serve(fails_twice)), SETTINGS, tmp_path / "out.jsonl"
    )
    assert made.written == 6 and made.retries == 12 and set(seen.values()) == {3}
    assert all(row["messages"][1]["content"].startswith("answer ") for row in rows_of(tmp_path / "out.jsonl").values())


def test_an_answer_that_does_not_come_is_asked_for_again(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve(lambda number, body: "silent" if number == 0 else None)
    made = answered([asked(0)], endpoint(server, timeout_s=0.3), SETTINGS, tmp_path / "out.jsonl")
    assert made.written == 1 and made.retries == 1


def test_answers_before_a_dead_server_are_kept(tmp_path: Path, serve: Callable[..., Server]) -> None:
    prompts = [asked(number) for number in range(30)]
    dying = serve(lambda number, body: "gone" if number >= 10 else None)
    with pytest.raises(DataError, match=r"failed 4 times in a row.*run the same command to resume") as error:
        answered(prompts, endpoint(dying), SETTINGS, tmp_path / "out.jsonl")
    assert len(error.value.errors) == 1
    kept = rows_of(tmp_path / "out.jsonl")
    assert len(kept) == 10
    made = answered(prompts[::-1], endpoint(serve()), SETTINGS, tmp_path / "out.jsonl")
    assert (made.written, made.already_there) == (20, 10)
    assert set(rows_of(tmp_path / "out.jsonl")) == {f"question {number}.0" for number in range(30)}


def test_refused_and_cut_rows_are_counted_and_told(tmp_path: Path, serve: Callable[..., Server]) -> None:
    def error(number: int, body: dict[str, Any]) -> str | None:
        return {"question 1.0": "400", "question 2.0": "cut"}.get(body["messages"][0]["content"])

    made = answered([asked(number) for number in range(4)], endpoint(serve(error)), SETTINGS, tmp_path / "out.jsonl")
    assert made.written == 2 and made.cut == 1 and made.retries == 0
    assert len(made.refused) == 1 and "HTTP 400" in made.refused[0]
    assert rows_of(cut_path(tmp_path / "out.jsonl"))["question 2.0"]["finish_reason"] == "length"


def test_what_cannot_pass_stops_at_once(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve(lambda number, body: "401")
    with pytest.raises(DataError, match=r"HTTP 401 .*check the address, the model and the key"):
        answered([asked(0)], endpoint(server), SETTINGS, tmp_path / "out.jsonl")
    assert len(server.bodies) == 1


def reply(content: object = "Yes.", **more: object) -> JsonDict:
    message = {"role": "assistant", "content": content, **more}
    return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}


@pytest.mark.parametrize(
    "broken",
    [
        {**reply(), "usage": {"completion_tokens": "two"}},
        {**reply(), "usage": [1]},
        reply([{"type": "text", "text": "Yes."}]),
        reply(reasoning_content={"a": 1}),
        {"choices": []},
    ],
)
def test_an_answer_of_another_shape_is_asked_again(
    broken: JsonDict, tmp_path: Path, serve: Callable[..., Server]
) -> None:
    server = serve(lambda number, body: broken if number == 0 else reply())
    made = answered([asked(0)], endpoint(server), SETTINGS, tmp_path / "out.jsonl")
    assert made.retries == 1
    assert rows_of(tmp_path / "out.jsonl")["question 0.0"]["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_a_count_that_is_null_is_zero(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve(lambda number, body: {**reply(), "usage": {"completion_tokens": None}})
    answered([asked(0)], endpoint(server), SETTINGS, tmp_path / "out.jsonl")
    assert rows_of(tmp_path / "out.jsonl")["question 0.0"]["answer_tokens"] == [0]


@pytest.mark.parametrize(("ids", "known"), [("returned", [5, 6, 7]), ("ignored", None), ("refused", None)])
def test_token_ids_are_kept_where_the_server_returns_them(
    ids: str, known: list[int] | None, tmp_path: Path, serve: Callable[..., Server]
) -> None:
    server = serve(ids=ids)
    made = answered([asked(number, 2) for number in range(9)], endpoint(server), SETTINGS, tmp_path / "out.jsonl")
    assert (made.written, made.retries, made.refused) == (9, 0, [])
    for row in rows_of(tmp_path / "out.jsonl").values():
        assert [turn.get("token_ids") for turn in row["messages"][1::2]] == [known] * 2
        assert row["answer_tokens"] == ([3, 3] if known else [7, 7])
    assert not any("token_ids" in turn for body in server.bodies for turn in body["messages"])
    if ids == "ignored":
        asked_for = sum("return_token_ids" in body for body in server.bodies)
        assert asked_for <= 8, "asked for until the first answers are there"


def test_a_password_in_the_address_logs_in_and_is_not_written(tmp_path: Path, serve: Callable[..., Server]) -> None:
    basic = "Basic " + base64.b64encode(b"ann:pass@word").decode()
    server = serve(lambda number, body: "400" if number == 1 else None, login=basic)
    url = server.url.replace("http://", "http://ann:pass%40word@")
    with_login = endpoint(server, url=url, in_flight=1)
    made = answered([asked(0), asked(1)], with_login, SETTINGS, tmp_path / "out.jsonl")
    assert made.written == 1 and len(made.refused) == 1
    with pytest.raises(DataError) as refused:
        answered([asked(2)], endpoint(server, url=url.replace("ann", "bob")), SETTINGS, tmp_path / "out.jsonl")
    with pytest.raises(DataError) as gone:
        server.error = lambda number, body: "gone"
        answered([asked(3)], endpoint(server, url=url, attempts=1), SETTINGS, tmp_path / "out.jsonl")
    with pytest.raises(DataError) as no_address:
        Client(endpoint(server, url="ftp://ann:pass%40word@host"))
    with pytest.raises(DataError, match="give one of them") as both:
        Client(endpoint(server, url=url, key="k"))
    shown = [str(error.value) for error in (refused, gone, no_address, both)]
    shown += [*made.refused, repr(with_login), (tmp_path / "out.jsonl").read_text(encoding="utf-8")]
    assert "HTTP 401" in shown[0] and "127.0.0.1" in shown[0]
    assert not any("pass" in text for text in shown)


def test_a_key_is_sent_as_a_bearer_token_and_not_shown(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve(login="Bearer sesame")
    assert answered([asked(0)], endpoint(server, key="sesame"), SETTINGS, tmp_path / "out.jsonl").written == 1
    with pytest.raises(DataError, match="HTTP 401") as error:
        answered([asked(1)], endpoint(server, key="simsim"), SETTINGS, tmp_path / "out.jsonl")
    assert "simsim" not in str(error.value) and "simsim" not in repr(endpoint(server, key="simsim"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"url": "http://localhost:abc/v1"}, "not an address of a server"),
        ({"url": "localhost:8000"}, "not an address of a server"),
        ({"in_flight": 0}, "in_flight is 0"),
        ({"attempts": 0}, "attempts is 0"),
        ({"timeout_s": 0.0}, r"timeout_s is 0\.0"),
        ({"key": "abc\n"}, "key .* line end"),
    ],
)
def test_an_endpoint_that_cannot_be_asked_is_refused_at_once(more: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said) as error:
        Client(Endpoint(**{"url": "http://localhost/v1", **more}))
    assert len(error.value.errors) == 1


SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["messages"][0]["content"] == sys.argv[1]:
            os._exit(9)
        message = {"role": "assistant", "content": "Yes."}
        data = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def test_a_run_resumes_after_its_server_was_killed(tmp_path: Path) -> None:
    prompts = [asked(number) for number in range(20)]
    for poison, written in (("question 12.0", None), ("none", 20)):
        with subprocess.Popen([sys.executable, "-c", SERVER, poison], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
            where = Endpoint(url, "tiny", in_flight=2, timeout_s=20.0, attempts=2, first_pause_s=0.001)
            if written is None:
                with pytest.raises(
                    DataError, match=r"failed 2 times in a row.*run the same command to resume"
                ) as error:
                    answered(prompts, where, SETTINGS, tmp_path / "out.jsonl")
                assert len(error.value.errors) == 1 and "\n" not in str(error.value)
                kept = len(rows_of(tmp_path / "out.jsonl"))
                assert 8 <= kept < 20
            else:
                made = answered(prompts, where, SETTINGS, tmp_path / "out.jsonl")
                assert (made.already_there, made.written) == (kept, 20 - kept)
                server.kill()
    assert set(rows_of(tmp_path / "out.jsonl")) == {f"question {number}.0" for number in range(20)}


def test_an_interrupted_run_keeps_what_was_answered(tmp_path: Path, serve: Callable[..., Server]) -> None:
    server = serve()
    prompts = [asked(number) for number in range(12)]

    def interrupted() -> Iterator[dict[str, Any]]:
        yield from prompts[:10]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answered(interrupted(), endpoint(server, in_flight=2), SETTINGS, tmp_path / "out.jsonl")
    assert 6 <= len(rows_of(tmp_path / "out.jsonl")) <= 10
    assert answered(prompts, endpoint(server), SETTINGS, tmp_path / "out.jsonl").already_there >= 6
