"""A small HTTP server that answers completions and counts as vLLM or SGLang do, and fails when asked to.

The answer to a prompt is its own tokens again, shifted by one; each pass accepts the drafts 0, 1, 2, 3, 0, 1, ...
As a program it stands in for an engine's: `... serve MODEL ... --port N`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NUM_DRAFTS = 3


class CountingServer(ThreadingHTTPServer):
    """Attributes:
    engine: vllm or sglang.
    drafts: whether it serves with a drafter.
    error: what goes wrong: `code` (HTTP 500 to a request), `cut` (the connection ends in an answer), `said` (an error
        among the pieces), `uncounted` (no usage), `no_metrics`, `strange_metrics`, `no_models`, `idle` (it never
        drafts), `others` (somebody else uses it).
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, engine: str = "vllm", *, drafts: bool = True, error: str = "", port: int = 0, **more: Any
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.engine, self.drafts, self.error = engine, drafts, error
        self.model: dict[str, Any] = {"id": "target", "root": "/models/target", "max_model_len": 64, **more}
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.generated, self.passes, self.by_slot = 0, 0, [0] * NUM_DRAFTS

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""

    def answer(self, body: dict[str, Any]) -> list[int]:
        with self.lock:
            self.bodies.append(body)
            ids = [token + 1 for token in body["prompt"]][: body["max_tokens"]]
            self.generated += len(ids) + (5 if self.error == "others" else 0)
            done, passed = 1, 0
            while self.drafts and self.error != "idle" and done < len(ids):
                accepted = passed % (NUM_DRAFTS + 1)
                self.passes, passed, done = self.passes + 1, passed + 1, done + accepted + 1
                for slot in range(accepted):
                    self.by_slot[slot] += 1
        return ids

    def metrics(self) -> str:
        label = '{engine="0",model_name="a \\"target\\""'
        if self.engine == "sglang":
            lines = [f"sglang:generation_tokens_total{label}}} {float(self.generated)}"]
            lines += [f"sglang:spec_verify_calls_total{label}}} {float(self.passes)}"] * self.drafts
            return "\n".join(lines) + "\n"
        lines = [
            "# TYPE vllm:generation_tokens counter",
            f"vllm:generation_tokens_total{label}}} {float(self.generated)}",
        ]
        if self.drafts:
            name = "vllm:spec_decode_num"
            lines += [
                f"{name}_drafts_total{label}}} {float(self.passes)}",
                f"{name}_draft_tokens_total{label}}} {float(NUM_DRAFTS * self.passes)}",
                f"{name}_accepted_tokens_total{label}}} {float(sum(self.by_slot))}",
            ]
            for slot, accepted in enumerate(self.by_slot):
                lines.append(f'{name}_accepted_tokens_per_pos_total{label},position="{slot}"}} {float(accepted)}')
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CountingServer

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        error = self.server.error
        if self.path == "/metrics":
            text = "sglang:x{ 1 2 3" if error == "strange_metrics" else self.server.metrics()
            self._send(404 if error == "no_metrics" else 200, text.encode())
        elif error == "no_models":
            self._send(200, b"<html>")
        else:
            self._send(200, json.dumps({"data": [self.server.model]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, error = self.server.answer(body), self.server.error
        if error == "code":
            self._send(500, b'{"error": "out of memory"}')
            return
        pieces: list[Any] = [{"choices": [{"text": f" {token}", "token_ids": [token]}]} for token in ids]
        pieces += [{"error": {"message": "the engine died"}}] * (error == "said")
        pieces += [{"choices": [], "usage": {"completion_tokens": len(ids)}}] * (error != "uncounted")
        data = b"".join(f"data: {json.dumps(piece)}\n\n".encode() for piece in pieces) + b"data: [DONE]\n\n"
        self._send(200, data[: len(data) // 2] if error == "cut" else data, len(data))
        self.close_connection = error == "cut"

    def _send(self, code: int, data: bytes, length: int | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)


def serve(running: list[CountingServer], server: CountingServer) -> CountingServer:
    """Start it in a thread; `running` is where it is ended from."""
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    running.append(server)
    return server


def expected_tau(prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[int, int]:
    """(tokens of the answers, target passes) of these prompts."""
    tokens = passes = 0
    for ids in prompts:
        length, done, passed = min(len(ids), max_tokens), 1, 0
        while done < length:
            done, passed = done + passed % (NUM_DRAFTS + 1) + 1, passed + 1
        tokens, passes = tokens + length, passes + passed
    return tokens, passes


if __name__ == "__main__":
    CountingServer(port=int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
