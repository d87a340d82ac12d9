"""The OpenAI chat protocol: what is sent for an answer, and what a reply must hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.regenerate.loop import OpenConversation, RegenerateSettings, template_variables
from paceline.types import JsonDict, Sampling


def check_completion(found: Any) -> None:
    """Check that a server's reply is a chat completion in text.

    Raises:
        AttributeError, IndexError, KeyError, TypeError: it is of another shape.
    """
    message, usage = found["choices"][0]["message"], found.get("usage") or {}
    if isinstance(message, dict):
        texts = [message.get(key) for key in ("content", "reasoning_content", "reasoning")]
        if not all(text is None or isinstance(text, str) for text in texts):
            raise TypeError("a message that is no text")
    if not isinstance(usage.get("completion_tokens") or 0, int):
        raise TypeError("a count that is no number")


def request_of(conversation: OpenConversation, settings: RegenerateSettings) -> JsonDict:
    """The body of the request for the next answer of a conversation."""
    sampling: Sampling = settings.sampling
    body: JsonDict = {
        "model": settings.model,
        "messages": [_sent(turn, settings) for turn in conversation.said],
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if conversation.extras.get("tools"):
        body["tools"] = conversation.extras["tools"]
    if variables := template_variables(conversation, settings):
        body["chat_template_kwargs"] = variables
    return body


def _sent(turn: JsonDict, settings: RegenerateSettings) -> JsonDict:
    """A turn as the protocol writes it: arguments of tool calls as JSON text."""
    keys = ("role", "content", "tool_call_id", "name", *(["reasoning_content"] if settings.send_reasoning else []))
    sent = {key: turn[key] for key in keys if turn.get(key) is not None}
    if turn.get("tool_calls"):
        sent["tool_calls"] = [_sent_call(call) for call in turn["tool_calls"]]
    return sent


def _sent_call(call: Mapping[str, Any]) -> JsonDict:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return {"type": "function", **call}
    arguments = msgspec.json.encode(function.get("arguments") or {}).decode()
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}
