"""Answers from a server that speaks the OpenAI chat protocol: many requests in flight, retries, resumable to the row.

Each conversation is asked turn by turn by one thread over a connection of its own; rows are written as they are
finished, so the order of the output says nothing and a row depends on its prompt only. What can pass (too many
requests, server errors, broken or missing answers) is tried again with growing pauses; what cannot (wrong address, no
access, a prompt that the server refuses) is not.
"""

from __future__ import annotations

import http.client
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from paceline.errors import DataError
from paceline.regenerate.loop import (
    OpenConversation,
    RegenerateReport,
    RegenerateSettings,
    cut_path,
    fits,
    open_conversations,
    rows_there,
    write_row,
)
from paceline.regenerate.protocol import check_completion, request_of
from paceline.types import JsonDict

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
"""HTTP codes after which the same request may succeed later."""
_REFUSED = frozenset({400, 413, 422})
"""HTTP codes by which a server refuses one prompt, for example because it is too long."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and how patiently it is asked.

    Attributes:
        url: address of the API, for example http://localhost:8000/v1.
        model: name of the model there; None = the only one that it names.
        key: sent as a bearer token, or None.
        in_flight: requests under way at once.
        timeout_s: longest wait for an answer.
        attempts: tries of one request.
        first_pause_s: pause after the first failure; doubled after each, up to a minute.
    """

    url: str
    model: str | None = None
    key: str | None = None
    in_flight: int = 32
    timeout_s: float = 600.0
    attempts: int = 6
    first_pause_s: float = _FIRST_PAUSE_S


@dataclass(slots=True)
class RemoteReport:
    """What one call did.

    Attributes:
        counts: as for local answers.
        refused: rows that the server refused or answered with neither an end nor a cut, with what it said.
        retries: failures that passed.
    """

    counts: RegenerateReport
    refused: list[str] = field(default_factory=list)
    retries: int = 0


class _Refused(Exception):
    """The server will not answer this prompt."""


class _Passing(Exception):
    """A failure after which the same request may succeed; `after_s` is the server's own wish, or None."""

    def __init__(self, what: str, after_s: float | None = None) -> None:
        super().__init__(what)
        self.after_s = after_s


def _address(url: str) -> SplitResult:
    """The parts of an address, or one line that it is none."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:
        usable, parts = False, None
    if parts is None or not usable:
        raise DataError(f"{url}: no address of a server; write for example http://localhost:8000/v1")
    return parts


class Client:
    """Sends requests to one server; safe for many threads, each with a connection of its own.

    Args:
        endpoint: the server.

    Raises:
        DataError: an address that is none.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        parts = _address(endpoint.url)
        for name, value in (("in_flight", endpoint.in_flight), ("attempts", endpoint.attempts)):
            if value < 1:
                raise DataError(f"{name} is {value}; it must be at least 1")
        if not endpoint.timeout_s > 0:
            raise DataError(f"timeout_s is {endpoint.timeout_s}; it must be more than 0")
        if endpoint.key is not None and not (endpoint.key.isascii() and endpoint.key.isprintable()):
            raise DataError("the server's key holds a line end, or something else that no header can carry")
        self.endpoint = endpoint
        self.stopped = threading.Event()
        self.retries = 0
        self._parts = parts
        self._local = threading.local()
        self._opened: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def model(self) -> str:
        """Name of the model to ask for.

        Raises:
            DataError: the server cannot be reached, or names none or several.
        """
        if self.endpoint.model:
            return self.endpoint.model
        try:
            names = [str(item["id"]) for item in self._patiently("GET", "/models", None, 0)["data"]]
        except _Refused as error:
            raise DataError(f"{self.endpoint.url}: {error}; give --model NAME") from error
        if len(names) != 1:
            listed = ", ".join(names[:8]) or "none"
            raise DataError(f"{self.endpoint.url}: the server names {len(names)} models ({listed}); give --model NAME")
        return names[0]

    def answer(self, body: JsonDict, key: int) -> JsonDict:
        """The first choice of a chat completion with its `usage`; `key` makes the pauses differ between rows.

        Raises:
            DataError: the server cannot be used, or failed too often.
        """
        found = self._patiently("POST", "/chat/completions", body, key)
        choice = found["choices"][0]
        if not isinstance(choice["message"], dict):
            raise _Refused("the answer holds no message")
        return {**choice, "usage": found.get("usage") or {}}

    def _patiently(self, method: str, path: str, body: JsonDict | None, key: int) -> JsonDict:
        pauses = random.Random(key)
        for attempt in range(1, self.endpoint.attempts + 1):
            try:
                return self._once(method, path, body)
            except _Passing as error:
                if attempt == self.endpoint.attempts:
                    raise DataError(
                        f"{self.endpoint.url}: failed {attempt} times in a row, the last time with: {error}; "
                        "what was answered is kept, run the same command to go on"
                    ) from error
                pause_s = min(_LONGEST_PAUSE_S, self.endpoint.first_pause_s * 2 ** (attempt - 1))
                pause_s = error.after_s if error.after_s is not None else pause_s * pauses.uniform(0.5, 1.0)
                with self._lock:
                    self.retries += 1
                if self.stopped.wait(min(pause_s, _LONGEST_PAUSE_S)):
                    raise DataError("stopped") from error
        raise AssertionError("attempts is at least 1")

    def _once(self, method: str, path: str, body: JsonDict | None) -> JsonDict:
        connection = self._connection()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.endpoint.key:
            headers["Authorization"] = f"Bearer {self.endpoint.key}"
        try:
            content = None if body is None else msgspec.json.encode(body)
            connection.request(method, self._parts.path.rstrip("/") + path, content, headers)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _Passing(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            self._fail(response, data)
        try:
            found = msgspec.json.decode(data)
            if body is None:
                _ = [item["id"] for item in found["data"]]
            else:
                check_completion(found)
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
            connection.close()
            raise _Passing(f"an answer that is not whole: {data[:80]!r}") from error
        return found

    def _fail(self, response: http.client.HTTPResponse, data: bytes) -> None:
        said = " ".join(data[:200].decode("utf-8", "replace").split())
        if response.status in _PASSING:
            wish = response.headers.get("Retry-After", "")
            known = wish.isascii() and wish.replace(".", "", 1).isdigit()
            raise _Passing(f"HTTP {response.status} {said}", float(wish) if known else None)
        if response.status in _REFUSED:
            raise _Refused(f"HTTP {response.status} {said}")
        raise DataError(f"{self.endpoint.url}: HTTP {response.status} {said}; check the address, the model and the key")

    def _connection(self) -> http.client.HTTPConnection:
        found = getattr(self._local, "connection", None)
        if found is None:
            kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            found = kind(self._parts.hostname or "", self._parts.port, timeout=self.endpoint.timeout_s)
            self._local.connection = found
            with self._lock:
                self._opened.append(found)
        return found

    def close(self) -> None:
        """Close the connections of all threads, which must have ended."""
        for connection in self._opened:
            connection.close()


def regenerate_remote(
    prompts: Iterable[Mapping[str, Any]],
    endpoint: Endpoint,
    settings: RegenerateSettings,
    output: Path,
    progress: Callable[[int], None] | None = None,
    count_tokens: Callable[[OpenConversation], int] | None = None,
) -> RemoteReport:
    """Answer every prompt that the output does not hold yet with a server, and add the conversations to it.

    Args:
        prompts: rows with `messages`; other keys are kept.
        endpoint: the server.
        settings: sampling, what becomes of cut answers, template variables; `batch_size` and `model` are not used.
        output: JSON lines file, made or continued; written in the order in which answers come.
        progress: hears of every finished row (1 each).
        count_tokens: tokens of a conversation with its generation prompt; called from many threads, and needed where
            `settings.max_context_tokens` is set.

    Each row: as `regenerate` writes it, with the server's name of the model, and `reasoning_content` in the turns where
    the server gave it.

    Raises:
        DataError: a server that cannot be used or that failed too often; what was answered is kept.
    """
    if settings.max_context_tokens is not None and count_tokens is None:
        raise DataError("max_context_tokens needs count_tokens: a server does not say how long a prompt is")
    client = Client(endpoint)
    try:
        return _regenerate(prompts, client, settings, output, progress, count_tokens)
    finally:
        client.close()


def _regenerate(
    prompts: Iterable[Mapping[str, Any]],
    client: Client,
    settings: RegenerateSettings,
    output: Path,
    progress: Callable[[int], None] | None,
    count_tokens: Callable[[OpenConversation], int] | None,
) -> RemoteReport:
    endpoint = client.endpoint
    settings = replace(settings, model=client.model())
    output.parent.mkdir(parents=True, exist_ok=True)
    done = rows_there(output, settings) | rows_there(cut_path(output), settings)
    counts = {"written": 0, "cut": 0, "already_there": 0, "repeated": 0, "answer_tokens": 0}
    refused: list[str] = []

    def take(futures: set[Future[OpenConversation | str]], kept: Any, cut: Any) -> None:
        """Write the answers that are there."""
        # Good answers first: one that failed must not cost those that came with it.
        for future in sorted(futures, key=lambda done: done.exception() is not None):
            found = future.result()
            if isinstance(found, str):
                refused.append(found)
            else:
                _keep(found, settings, counts, kept, cut)
            if progress:
                progress(1)

    with (
        output.open("ab") as kept,
        cut_path(output).open("ab") as cut,
        ThreadPoolExecutor(endpoint.in_flight, thread_name_prefix="ask") as pool,
    ):
        waiting: set[Future[OpenConversation | str]] = set()
        try:
            for conversation in open_conversations(prompts, done, counts):
                waiting.add(pool.submit(_ask, conversation, client, settings, count_tokens))
                # Twice as many as are under way, so that no thread waits for the reading of rows.
                if len(waiting) >= 2 * endpoint.in_flight:
                    ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    take(ready, kept, cut)
            while waiting:
                ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                take(ready, kept, cut)
        except BaseException:
            client.stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for future in waiting:
                if not future.cancelled() and future.exception() is None:
                    take({future}, kept, cut)
            raise
    if not cut_path(output).stat().st_size:
        cut_path(output).unlink()
    return RemoteReport(RegenerateReport(**counts), refused, client.retries)


def _keep(found: OpenConversation, settings: RegenerateSettings, counts: dict[str, int], kept: Any, cut: Any) -> None:
    was_cut = found.finish_reason == "length"
    dropped = was_cut and (settings.cut == "drop" or not found.answer_tokens)
    write_row(cut if dropped else kept, found, settings)
    counts["cut"] += was_cut
    counts["written"] += not dropped
    counts["answer_tokens"] += sum(found.answer_tokens)


def _ask(
    conversation: OpenConversation,
    client: Client,
    settings: RegenerateSettings,
    count_tokens: Callable[[OpenConversation], int] | None,
) -> OpenConversation | str:
    """All turns of one conversation; what the server, or the chat template, said where it refuses."""
    key = int(conversation.row_id, 16)
    while conversation.advance():
        if settings.max_context_tokens is not None and count_tokens is not None:
            try:
                fitting = fits(count_tokens(conversation), settings)
            except DataError as error:
                return str(error)
            if not fitting:
                conversation.too_long()
                break
        try:
            choice = client.answer(request_of(conversation, settings), key)
            reason = choice.get("finish_reason")
            if reason not in ("stop", "length"):
                raise _Refused(f"finish_reason {reason!r}")
        except _Refused as error:
            return f"prompt {conversation.row_id}: {error}"
        message = choice["message"]
        turn = {"role": "assistant", "content": message.get("content") or ""}
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            turn["reasoning_content"] = reasoning
        conversation.answer(turn, int(choice["usage"].get("completion_tokens") or 0), reason)
    return conversation
