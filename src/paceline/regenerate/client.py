"""Answers from a server that speaks the OpenAI chat protocol: many requests in flight, retries with growing pauses.

What can pass (too many requests, server errors, broken or missing answers) is tried again; what cannot (wrong address,
no access, a prompt that the server refuses) is not.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import msgspec

from paceline.errors import DataError
from paceline.regenerate.loop import OpenConversation, RegenerateSettings, ServerReply
from paceline.text import first_line
from paceline.types import JsonDict

_LONGEST_PAUSE_S = 60.0
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
"""HTTP codes after which the same request may succeed later."""
_REFUSED = frozenset({400, 413, 422})
"""HTTP codes by which a server refuses one prompt, for example because it is too long."""
_ASK_FOR_IDS = {"return_token_ids": True}
"""What makes vLLM return the ids of an answer; other servers ignore it, or refuse it and are asked without."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and how patiently it is asked.

    Attributes:
        url: address of the API, for example http://localhost:8000/v1; user and password in it log in.
        model: name of the model there; None = the only one that it names.
        key: sent as a bearer token, or None.
        in_flight: requests under way at once.
        timeout_s: longest wait for an answer.
        attempts: tries of one request.
        first_pause_s: pause after the first failure; doubled after each, up to a minute.
    """

    url: str = field(repr=False)
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    in_flight: int = 32
    timeout_s: float = 600.0
    attempts: int = 6
    first_pause_s: float = 0.5


class _Refused(Exception):
    """The server will not answer this prompt."""


class _Passing(Exception):
    """A failure after which the same request may succeed; `after_s` is the server's own wish, or None."""

    def __init__(self, what: str, after_s: float | None = None) -> None:
        super().__init__(what)
        self.after_s = after_s


class Client:
    """Sends requests to one server; safe for many threads.

    Args:
        endpoint: the server.

    Raises:
        DataError: an endpoint that cannot be asked.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        url, auth = address_of(endpoint.url)
        for name, value in (("in_flight", endpoint.in_flight), ("attempts", endpoint.attempts)):
            if value < 1:
                raise DataError(f"{name} is {value}; it must be at least 1")
        if not endpoint.timeout_s > 0:
            raise DataError(f"timeout_s is {endpoint.timeout_s}; it must be more than 0")
        if endpoint.key is not None and not (endpoint.key.isascii() and endpoint.key.isprintable()):
            raise DataError("the server's key holds a line end, or something else that no header can carry")
        if endpoint.key and auth:
            raise DataError(f"{url}: the address holds a user, and a key is given; give one of them")
        self.url = str(url)
        """The address without user and password."""
        self.in_flight = endpoint.in_flight
        self.stopped = threading.Event()
        self.retries = 0
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._http = httpx.Client(
            base_url=url,
            auth=auth,
            headers={"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {},
            timeout=endpoint.timeout_s,
            limits=httpx.Limits(max_connections=endpoint.in_flight, max_keepalive_connections=endpoint.in_flight),
        )

    def model(self) -> str:
        """Name of the model to ask for.

        Raises:
            DataError: the server cannot be reached, or names none or several.
        """
        if self._endpoint.model:
            return self._endpoint.model
        try:
            names = [str(item["id"]) for item in self._patiently("GET", "/models", None, 0)["data"]]
        except _Refused as error:
            raise DataError(f"{self.url}: {error}; give --model NAME") from error
        if len(names) != 1:
            listed = ", ".join(names[:8]) or "none"
            raise DataError(f"{self.url}: the server names {len(names)} models ({listed}); give --model NAME")
        return names[0]

    def complete(self, body: JsonDict, key: int) -> JsonDict:
        """The reply to a chat completion; `key` makes the pauses differ between rows.

        Raises:
            DataError: the server cannot be used, or failed too often.
        """
        return self._patiently("POST", "/chat/completions", body, key)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _patiently(self, method: str, path: str, body: JsonDict | None, key: int) -> JsonDict:
        pauses, endpoint = random.Random(key), self._endpoint
        for attempt in range(1, endpoint.attempts + 1):
            try:
                return self._once(method, path, body)
            except _Passing as error:
                if attempt == endpoint.attempts:
                    raise DataError(
                        f"{self.url}: failed {attempt} times in a row, the last time with: {error}; "
                        "what was answered is kept, run the same command to resume"
                    ) from error
                pause_s = endpoint.first_pause_s * 2 ** (attempt - 1) * pauses.uniform(0.5, 1.0)
                pause_s = min(_LONGEST_PAUSE_S, pause_s if error.after_s is None else error.after_s)
                with self._lock:
                    self.retries += 1
                if self.stopped.wait(pause_s):
                    raise DataError(f"{self.url}: not asked again, as the run ends") from error
        raise AssertionError("attempts is at least 1")

    def _once(self, method: str, path: str, body: JsonDict | None) -> JsonDict:
        try:
            content = None if body is None else msgspec.json.encode(body)
            response = self._http.request(method, path, content=content, headers={"Content-Type": "application/json"})
        except httpx.TransportError as error:
            raise _Passing(f"{type(error).__name__}: {first_line(error)}") from error
        if response.status_code != 200:
            self._fail(response)
        try:
            found = msgspec.json.decode(response.content)
            _ = [item["id"] for item in found["data"]] if body is None else _reply(found)
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise _Passing(f"an answer that is not whole: {response.content[:80]!r}") from error
        return found

    def _fail(self, response: httpx.Response) -> None:
        code, said = response.status_code, " ".join(response.text[:200].split())
        if code in _PASSING:
            wish = response.headers.get("Retry-After", "")
            known = wish.isascii() and wish.replace(".", "", 1).isdigit()
            raise _Passing(f"HTTP {code} {said}", float(wish) if known else None)
        if code in _REFUSED:
            raise _Refused(f"HTTP {code} {said}")
        raise DataError(f"{self.url}: HTTP {code} {said}; check the address, the model and the key")


def address_of(url: str) -> tuple[httpx.URL, tuple[str, str] | None]:
    """An address without user and password, and these.

    Raises:
        DataError: no address of a server.
    """
    bare = url.rpartition("@")[2]
    try:
        parsed = httpx.URL(url)
        usable = parsed.scheme in ("http", "https") and bool(parsed.host) and parsed.port != 0
    except (httpx.InvalidURL, ValueError):
        usable, parsed = False, httpx.URL()
    if not usable:
        raise DataError(f"{bare}: not an address of a server; write for example http://localhost:8000/v1")
    auth = (parsed.username, parsed.password) if parsed.userinfo else None
    return parsed.copy_with(username=None, password=None), auth


class ServerAnswers:
    """Asks a server for the answers of many conversations at once.

    Args:
        client: of the server; closed with this.
        settings: of the answers; `model` is the name at the server.
        send_reasoning: whether the server gets the reasoning of earlier answers back, as `reasoning_content`: where the
            target's chat template reads that.
    """

    def __init__(self, client: Client, settings: RegenerateSettings, *, send_reasoning: bool = False) -> None:
        # Twice as many as are under way, so that no thread waits for the reading of rows.
        self.num_open = 2 * client.in_flight
        self._client = client
        self._settings = settings
        self._send_reasoning = send_reasoning
        self._returns_ids: bool | None = None
        self._threads = ThreadPoolExecutor(client.in_flight, thread_name_prefix="ask")
        self._asked: dict[Future[ServerReply | str], OpenConversation] = {}
        self._error: BaseException | None = None

    @property
    def retries(self) -> int:
        """Requests that were tried again."""
        return self._client.retries

    def submit(self, conversation: OpenConversation) -> None:
        """Ask for the next answer of a conversation; nothing is asked once the server has failed."""
        if self._error is None:
            self._asked[self._threads.submit(self._ask, conversation)] = conversation

    def collect(self) -> list[tuple[OpenConversation, ServerReply | str]]:
        """Wait for answers.

        Raises:
            DataError: the server failed; raised when the answers that it gave before are collected.
        """
        if self._error is not None:
            raise self._error
        done, _ = wait(self._asked, return_when=FIRST_COMPLETED)
        found = self._taken(done)
        if self._error is not None:
            found += self._stop()
        return found or self.collect()

    def close(self) -> list[tuple[OpenConversation, ServerReply | str]]:
        """End what is under way, and hand out the answers that came meanwhile."""
        found = self._stop()
        self._client.close()
        return found

    def _stop(self) -> list[tuple[OpenConversation, ServerReply | str]]:
        self._client.stopped.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        return self._taken(set(self._asked))

    def _taken(self, done: set[Future[ServerReply | str]]) -> list[tuple[OpenConversation, ServerReply | str]]:
        """The answers among finished requests; the first error is kept."""
        found: list[tuple[OpenConversation, ServerReply | str]] = []
        for future in done:
            conversation = self._asked.pop(future)
            if future.cancelled():
                continue
            if error := future.exception():
                self._error = self._error or error
            else:
                found.append((conversation, future.result()))
        return found

    def _ask(self, conversation: OpenConversation) -> ServerReply | str:
        """The next answer of a conversation, or what the server said where it refuses."""
        body, key = self._request(conversation), int(conversation.row_id, 16)
        try:
            if self._returns_ids is not False:
                try:
                    found = self._client.complete({**body, **_ASK_FOR_IDS}, key)
                except _Refused:
                    if self._returns_ids:
                        raise
                    found = self._client.complete(body, key)
                self._returns_ids = found["choices"][0].get("token_ids") is not None
            else:
                found = self._client.complete(body, key)
            reply = _reply(found)
        except _Refused as error:
            reply = str(error)
        return reply if isinstance(reply, ServerReply) else f"prompt {conversation.row_id}: {reply}"

    def _request(self, conversation: OpenConversation) -> JsonDict:
        """The body of the request for the next answer of a conversation."""
        sampling = self._settings.sampling
        body: JsonDict = {
            "model": self._settings.model,
            "messages": [self._sent(turn) for turn in conversation.said],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if conversation.extras.get("tools"):
            body["tools"] = conversation.extras["tools"]
        if variables := conversation.template_variables(self._settings):
            body["chat_template_kwargs"] = variables
        return body

    def _sent(self, turn: JsonDict) -> JsonDict:
        """A turn as the protocol writes it: arguments of tool calls as JSON text."""
        keys = ("role", "content", "tool_call_id", "name", *(["reasoning_content"] if self._send_reasoning else []))
        sent = {key: turn[key] for key in keys if turn.get(key) is not None}
        if turn.get("tool_calls"):
            sent["tool_calls"] = [_sent_call(call) for call in turn["tool_calls"]]
        return sent


def answers_of(
    endpoint: Endpoint, settings: RegenerateSettings, *, send_reasoning: bool = False
) -> tuple[ServerAnswers, RegenerateSettings]:
    """Who answers at a server, and the settings with the server's name of the model.

    Raises:
        DataError: the server cannot be asked or reached, or names no model, or several.
    """
    client = Client(endpoint)
    try:
        settings = replace(settings, model=client.model())
    except BaseException:
        client.close()
        raise
    return ServerAnswers(client, settings, send_reasoning=send_reasoning), settings


def _sent_call(call: Mapping[str, Any]) -> JsonDict:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return {"type": "function", **call}
    arguments = msgspec.json.encode(function.get("arguments") or {}).decode()
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _reply(found: Any) -> ServerReply | str:
    """The answer in a server's reply; text says why there is none.

    Raises:
        AttributeError, IndexError, KeyError, TypeError: it is not a chat completion in text.
    """
    choice, usage = found["choices"][0], found.get("usage") or {}
    message, reason, ids = choice["message"], choice.get("finish_reason"), choice.get("token_ids")
    if not isinstance(message, dict):
        return "the answer holds no message"
    content, thought = message.get("content") or "", message.get("reasoning_content") or message.get("reasoning") or ""
    num_tokens = usage.get("completion_tokens") or 0
    if not isinstance(content, str) or not isinstance(thought, str) or not isinstance(num_tokens, int):
        raise TypeError("a message that is not text, or a count that is not a number")
    if reason not in ("stop", "length"):
        return f"finish_reason {reason!r}"
    turn: JsonDict = {"role": "assistant", "content": content}
    if thought:
        turn["reasoning_content"] = thought
    if isinstance(ids, list) and all(type(item) is int for item in ids):
        turn["token_ids"], num_tokens = ids, len(ids)
    return ServerReply(turn, num_tokens, reason)
