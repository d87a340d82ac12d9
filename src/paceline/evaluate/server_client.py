"""A running server of the OpenAI protocol, as it is measured: which model it has, its counters, answers with times.

Prompts are sent as token ids to ``/v1/completions``, so that every server and `paceline evaluate` read the same ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import httpx

from paceline.errors import DataError
from paceline.evaluate.server_counters import Counters, read_counters
from paceline.regenerate.client import address_of
from paceline.text import first_line

SETTLED_S = 5.0
"""Counters are written a moment after the answers; longer than this is not waited for."""
PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server says of its model.

    Attributes:
        name: to ask for.
        known_as: name and folder, whole and their last parts.
        max_length: tokens of prompt and answer together; None where it does not say.
    """

    name: str
    known_as: frozenset[str]
    max_length: int | None


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """One answer.

    Attributes:
        ids: its token ids; None where the server does not return them.
        text: without special tokens.
        tokens: how many, the one that ends it included.
        first_s, seconds: from the request to its first and to its last token.
    """

    ids: tuple[int, ...] | None
    text: str
    tokens: int
    first_s: float
    seconds: float

    def same(self, other: ServedAnswer) -> bool:
        """Whether two answers are equal: by their token ids, or their texts where a server returns no ids."""
        if self.ids is None or other.ids is None:
            return self.text == other.text
        return self.ids == other.ids


class MeasuredServer:
    """Asks one server; safe for many threads.

    Args:
        url: of the server, for example http://localhost:8000; user and password in it log in.
        key: sent as a bearer token, or None.
        timeout_s: longest wait for a token.

    Raises:
        DataError: no address of a server.
    """

    def __init__(self, url: str, key: str | None = None, timeout_s: float = 600.0) -> None:
        address, auth = address_of(url)
        self.url = str(address).rstrip("/").removesuffix("/v1")
        """The address without user and password."""
        self._http = httpx.Client(
            base_url=self.url,
            auth=auth,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    def healthy(self) -> bool:
        """Whether it says that it can answer."""
        try:
            return self._http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def model(self, wanted: str | None = None) -> ServedModel:
        """The model that is measured: the one that the server names, or that of several which is wanted.

        Raises:
            DataError: the server cannot be reached, is none of the protocol, or has no such model.
        """
        response = self._get("/v1/models")
        try:
            models = [
                ServedModel(item["id"], _names(item), item.get("max_model_len")) for item in response.json()["data"]
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{self.url}/v1/models: no list of models; give the address of a server") from error
        names = ", ".join(model.name for model in models[:8]) or "none"
        found = [model for model in models if wanted is None or model.name == wanted]
        if wanted is not None and not found:
            raise DataError(f"{self.url}: no model {wanted} there; it names {names}")
        if len(found) != 1:
            raise DataError(f"{self.url}: the server names {len(models)} models ({names}); give --model NAME")
        return found[0]

    def counters(self) -> Counters | None:
        """What it counted since its start; None where it shows no counters of vLLM or SGLang.

        Raises:
            DataError: the server cannot be reached.
        """
        response = self._request("GET", "/metrics")
        if response.status_code != 200:
            return None
        try:
            return read_counters(response.text)
        except ValueError as error:
            raise DataError(f"{self.url}/metrics: not in Prometheus' format ({first_line(error)})") from error

    def settled(self, generated: int) -> Counters | None:
        """The counters once they have reached a number of generated tokens, or after a while without."""
        deadline = time.monotonic() + SETTLED_S
        while (found := self.counters()) and found.generated < generated and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        return found

    def answer(
        self,
        model: str,
        ids: Sequence[int],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        salt: str = "",
    ) -> ServedAnswer:
        """Answer a prompt.

        Args:
            model: its name.
            ids: of the prompt.
            max_tokens: longest answer.
            temperature, seed: of the sampling; 0 is greedy. Nothing else of the model's defaults has a part in it.
            salt: prompts with another salt share no cached prefix; empty: they share them.

        Raises:
            DataError: the server fails or refuses.
        """
        body = {
            "model": model,
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **({"cache_salt": salt} if salt else {}),
        }
        began = time.perf_counter()
        found: list[int] | None = []
        text, tokens, first_s = "", None, None
        try:
            for chunk in self._events(body):
                for choice in chunk.get("choices", ()):
                    given = choice.get("token_ids")
                    found = None if given is None or found is None else [*found, *given]
                    text += choice.get("text") or ""
                    first_s = first_s or time.perf_counter() - began
                usage = chunk.get("usage") or {}
                tokens = usage.get("completion_tokens", tokens)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if not tokens or first_s is None:
            raise DataError(f"{self.url}: an answer without tokens, or without a count of them (usage)")
        return ServedAnswer(tuple(found) if found else None, text, tokens, first_s, time.perf_counter() - began)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The pieces of an answer as they come."""
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise self._refused(response)
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                try:
                    chunk = json.loads(data)
                except ValueError:
                    chunk = None
                if not isinstance(chunk, dict) or "error" in chunk:
                    raise DataError(f"{self.url}: it sent no piece of an answer, but {' '.join(data[:200].split())}")
                yield chunk

    def _get(self, path: str) -> httpx.Response:
        response = self._request("GET", path)
        if response.status_code != 200:
            raise self._refused(response)
        return response

    def _request(self, method: str, path: str) -> httpx.Response:
        try:
            return self._http.request(method, path)
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    def _lost(self, error: httpx.HTTPError) -> DataError:
        return DataError(f"{self.url}: {type(error).__name__}: {first_line(error)}; is the server still running there?")

    def _refused(self, response: httpx.Response) -> DataError:
        said = " ".join(response.text[:200].split())
        return DataError(
            f"{self.url}{response.request.url.path}: HTTP {response.status_code} {said}; check the address, the key "
            "and the server's log"
        )


def _names(item: Mapping[str, Any]) -> frozenset[str]:
    given = {str(item[key]) for key in ("id", "root") if item.get(key)}
    return frozenset(given | {PurePath(name).name for name in given})
