"""What a row of a data file is, whatever its form: a conversation, plain text, or ready tokens.

Forms: `messages` (OpenAI), `conversations` (ShareGPT), `prompt` and `response`, `text`, `input_ids` and `loss_mask`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.types import JsonDict

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_ANSWER_KEYS = ("response", "completion", "answer", "output")
_TEMPLATE_KEYS = ("chat_template_kwargs", "template_kwargs")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_CUT_REASONS = ("length", "max_tokens", "cut")


class RowRejected(Exception):
    """A row that cannot be used: `reason` is a key of `report.REASONS`, `detail` says what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(reason, detail)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of a chat and what its template is told beside them.

    Attributes:
        messages: role and content each, and whatever else the template reads (tool_calls, reasoning_content).
        tools: JSON schemas of the tools offered, or None.
        template: further variables of the chat template, for example `enable_thinking`.
        tags: words by which reports are split.
        cut: whether the last answer was cut by a token limit when it was generated.
        row_id: the row's own id, or None.
    """

    messages: list[JsonDict]
    tools: list[JsonDict] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    cut: bool = False
    row_id: str | None = None


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text without turns."""

    text: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadyTokens:
    """Token ids with their loss mask, made elsewhere."""

    ids: Sequence[int]
    loss_mask: Sequence[bool]
    tags: tuple[str, ...] = ()


Row = Conversation | PlainText | ReadyTokens


def read_row(row: Any, *, answered: bool = True) -> Row:
    """The row in its form.

    Args:
        row: one JSON object.
        answered: whether a conversation must have an assistant turn after a user turn.

    Raises:
        SetAside: no known form (`no_messages`), images and the like (`not_text`), wrong types or roles
            (`wrong_roles`), no assistant turn after a prompt (`no_assistant`), ids and mask that do not fit
            (`bad_tokens`), nothing written (`empty_text`).
    """
    if not isinstance(row, Mapping):
        raise RowRejected("no_messages", f"a row is an object, this is a {type(row).__name__}")
    tags = tags_of(row)
    if row.get("messages") is not None:
        return _conversation(row, _turns(row["messages"]), tags, answered)
    if row.get("conversations") is not None:
        return _conversation(row, _sharegpt(row["conversations"]), tags, answered)
    if row.get("input_ids") is not None:
        return _ready(row, tags)
    answer = next((row[key] for key in _ANSWER_KEYS if row.get(key) is not None), None)
    if row.get("prompt") is not None and (answer is not None or not answered):
        return _conversation(row, _pair(row["prompt"], answer or []), tags, answered)
    if row.get("text") is not None:
        if not isinstance(row["text"], str) or not row["text"].strip():
            raise RowRejected("empty_text", "text is empty or not a string")
        return PlainText(row["text"], tags)
    keys = ", ".join(map(str, row)) or "none"
    raise RowRejected("no_messages", f"keys: {keys}")


def _conversation(
    row: Mapping[str, Any], messages: list[JsonDict], tags: tuple[str, ...], answered: bool
) -> Conversation:
    _check_turns(messages, answered)
    template: dict[str, Any] = {}
    for key in _TEMPLATE_KEYS:
        if isinstance(row.get(key), Mapping):
            template.update(row[key])
    if isinstance(row.get("enable_thinking"), bool):
        template["enable_thinking"] = row["enable_thinking"]
    tools = row.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise RowRejected("wrong_roles", "tools is no list of objects")
    cut = row.get("finish_reason") in _CUT_REASONS or row.get("truncated") is True
    row_id = row.get("id")
    return Conversation(messages, tools, template, tags, cut, None if row_id is None else str(row_id))


def _turns(messages: Any) -> list[JsonDict]:
    if not isinstance(messages, list) or not messages:
        raise RowRejected("no_messages", "messages is no list of turns, or empty")
    turns: list[JsonDict] = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowRejected("wrong_roles", f"turn {place} has no role")
        # A key that is null is a key that is not there: templates would write the word None.
        turn = {str(key): value for key, value in message.items() if value is not None}
        if isinstance(turn.get("content"), list):
            turn["content"] = _joined(turn["content"], place)
        if turn.get("tool_calls"):
            turn["tool_calls"] = _with_objects(turn["tool_calls"], place)
        thought = next((turn[key] for key in _REASONING_KEYS if isinstance(turn.get(key), str)), None)
        if thought is not None:
            turn["reasoning_content"] = thought
        turns.append(turn)
    return turns


def _joined(parts: list[Any], place: int) -> str:
    """Text parts as one text, as servers hand them to templates; parts of another kind cannot be drafted from text."""
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RowRejected("not_text", f"turn {place} has parts of another type than text")
    return "\n".join(map(str, texts))


def _with_objects(calls: Any, place: int) -> list[JsonDict]:
    """Tool calls with arguments as objects: the protocol writes JSON text, which servers read before they render."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RowRejected("wrong_roles", f"turn {place}: tool_calls is no list of objects")
    found: list[JsonDict] = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = msgspec.json.decode(function["arguments"] or "{}")
            except (msgspec.DecodeError, RecursionError) as error:
                raise RowRejected("wrong_roles", f"turn {place}: arguments of a tool call are no JSON") from error
            call = {**call, "function": {**function, "arguments": arguments}}
        found.append(dict(call))
    return found


def _sharegpt(turns: Any) -> list[JsonDict]:
    if not isinstance(turns, list) or not turns:
        raise RowRejected("no_messages", "conversations is no list of turns, or empty")
    messages: list[JsonDict] = []
    for place, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise RowRejected("wrong_roles", f"turn {place} is no object")
        speaker = turn.get("from", turn.get("role"))
        role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise RowRejected("wrong_roles", f"turn {place} is from {speaker!r}")
        messages.append({"role": role, "content": turn.get("value", turn.get("content"))})
    return _turns(messages)


def _pair(prompt: Any, answer: Any) -> list[JsonDict]:
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if not isinstance(asked, list) or not isinstance(said, list):
        raise RowRejected("wrong_roles", "prompt and response are texts or lists of turns")
    return _turns(asked + said)


def _check_turns(messages: list[JsonDict], must_answer: bool) -> None:
    asked = False
    answered = False
    for place, turn in enumerate(messages):
        role = turn["role"]
        if role not in ROLES:
            raise RowRejected("wrong_roles", f"turn {place} has role {role!r}")
        content = turn.get("content")
        if content is None and role == "assistant" and turn.get("tool_calls"):
            turn["content"] = content = ""
        if not isinstance(content, str):
            raise RowRejected("wrong_roles", f"turn {place} ({role}) has no content")
        asked = asked or role == "user"
        answered = answered or (role == "assistant" and asked)
    if not asked or (must_answer and not answered):
        raise RowRejected("no_assistant", "roles: " + ", ".join(turn["role"] for turn in messages[:6]))


def _ready(row: Mapping[str, Any], tags: tuple[str, ...]) -> ReadyTokens:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if mask is None:
        raise RowRejected("bad_tokens", "input_ids without loss_mask")
    if not isinstance(ids, Sequence) or not isinstance(mask, Sequence) or len(ids) != len(mask):
        raise RowRejected("bad_tokens", "input_ids and loss_mask are not lists of one length")
    if any(type(item) is not int or item < 0 for item in ids):
        raise RowRejected("bad_tokens", "input_ids holds something that is no token id")
    if any(item not in (0, 1) for item in mask):
        raise RowRejected("bad_tokens", "loss_mask holds something other than 0 and 1")
    return ReadyTokens(ids, [bool(item) for item in mask], tags)


def tags_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The words in `tags` or `tag` of a row."""
    found = row.get("tags", row.get("tag", ()))
    listed = [found] if isinstance(found, str) else list(found) if isinstance(found, (list, tuple)) else []
    words = [f"{word}".replace(",", " ").strip() for word in listed]
    return tuple(dict.fromkeys(word for word in words if word))
