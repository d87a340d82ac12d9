"""What a row of a data file is, whatever its form: a conversation, plain text, or ready tokens.

Forms: `messages` (OpenAI), `conversations` (ShareGPT), `prompt` and `response`, `text`, `input_ids` and `loss_mask` or
`labels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.text import check_depth
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
    "function": "tool",
    "function_call": "assistant",
}
_ANSWER_KEYS = ("response", "completion", "answer", "output")
_TEMPLATE_KEYS = ("template", "template_kwargs", "chat_template_kwargs")
"""Where a row holds variables of the chat template, the strongest last; the first in rows of `regenerate` alone."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MEDIA_KEYS = ("images", "image", "videos", "video", "audios", "audio")
_LOSS_KEYS = ("weight", "loss", "train", "training")
_FLAT_CALL_KEYS = ("name", "arguments", "parameters")
_OWN_KEYS = (*_LOSS_KEYS, "token_ids")
"""Keys of a turn that say how it is learned; templates do not read them."""
_PLAIN = {"role", "content"}
"""Keys of most turns, which need no more reading."""
NOT_LEARNED = -100
"""The label of a token that is not learned, as in torch's cross entropy."""
_CUT_REASONS = ("length", "max_tokens", "cut")


class RowRejected(Exception):
    """A row that cannot be used: `reason` is a key of `report.REASONS`, `detail` says what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(reason, detail)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of a chat and what its template gets beside them.

    Attributes:
        messages: role and content each, and whatever else the template reads: `tool_calls` with arguments as objects,
            `reasoning_content` for a thought, whatever its name in the row was.
        tools: JSON schemas of the tools offered, or None.
        template: further variables of the chat template, for example `enable_thinking`.
        served: whether `template` holds all variables with which the answers were served, so that none is to be found.
        tags: words by which reports are split.
        cut: whether the last answer was cut by a token limit when it was generated.
        row_id: the row's own id, or None.
        without_loss: assistant turns that are context and never supervised.
        token_ids: turn → the ids of its answer as a server returned them.
    """

    messages: list[JsonDict]
    tools: list[JsonDict] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    served: bool = False
    tags: tuple[str, ...] = ()
    cut: bool = False
    row_id: str | None = None
    without_loss: frozenset[int] = frozenset()
    token_ids: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text without turns."""

    text: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadyTokens:
    """Token ids with their loss mask, as the row has them."""

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
        RowRejected: no known form (`no_messages`), images and the like (`not_text`), wrong types or roles
            (`wrong_roles`), no assistant turn after a prompt (`no_assistant`), ids and mask that do not fit
            (`bad_tokens`), nothing written (`empty_text`).
    """
    if not isinstance(row, Mapping):
        raise RowRejected("no_messages", f"a row is an object, this is a {type(row).__name__}")
    tags = tags_of(row)
    if row.get("messages") is not None:
        return _conversation(row, row["messages"], tags, answered)
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


def _conversation(row: Mapping[str, Any], turns: Any, tags: tuple[str, ...], answered: bool) -> Conversation:
    for key in _MEDIA_KEYS:
        if row.get(key):
            raise RowRejected("not_text", f"the row has {key}")
    raw = _with_system(row.get("system"), _list_of_turns(turns))
    messages = [_turn(message, place) for place, message in enumerate(raw)]
    _check_turns(messages, answered)
    template: dict[str, Any] = {}
    served = "prompt_hash" in row and isinstance(row.get("template"), Mapping)
    for key in _TEMPLATE_KEYS[not served :]:
        if isinstance(row.get(key), Mapping):
            template.update(row[key])
    if isinstance(row.get("enable_thinking"), bool):
        template["enable_thinking"] = row["enable_thinking"]
    row_id, more = row.get("id"), [(place, message) for place, message in enumerate(raw) if message.keys() != _PLAIN]
    return Conversation(
        messages,
        _tools(row.get("tools")),
        template,
        served=served,
        tags=tags,
        cut=row.get("finish_reason") in _CUT_REASONS or row.get("truncated") is True,
        row_id=None if row_id is None else str(row_id),
        without_loss=frozenset(place for place, message in more if _has_no_loss(message)),
        token_ids={place: message["token_ids"] for place, message in more if _has_token_ids(message)},
    )


def _list_of_turns(turns: Any) -> list[Mapping[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise RowRejected("no_messages", "the turns are not a list, or there are none")
    for place, message in enumerate(turns):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowRejected("wrong_roles", f"turn {place} has no role")
    return turns


def _with_system(system: Any, turns: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The turns behind the row's own system text, where it has one beside them."""
    if system is None or system == "":
        return turns
    if not isinstance(system, str):
        raise RowRejected("wrong_roles", "the row's system is not text")
    if turns[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *turns]
    if turns[0].get("content") != system:
        raise RowRejected("wrong_roles", "the row has a system text and another one in its first turn")
    return turns


def _turn(message: Mapping[str, Any], place: int) -> JsonDict:
    """A turn as templates read it, whatever its form in the row."""
    if message.keys() == _PLAIN and type(message["content"]) is str and message["role"] != "function":
        return dict(message)
    # A key that is null is a key that is not there: templates would write the word None.
    turn = {key: value for key, value in message.items() if value is not None and key not in _OWN_KEYS}
    if turn["role"] == "function":
        turn["role"] = "tool"
    thoughts = [turn.pop(key) for key in _REASONING_KEYS if key in turn]
    thoughts = [thought for thought in thoughts if not isinstance(thought, bool)]
    if "reasoning_details" in turn:
        thoughts.append(_detailed_thought(turn.pop("reasoning_details"), place, bool(thoughts)))
    if isinstance(turn.get("content"), list):
        turn["content"], inside = _joined(turn["content"], place)
        thoughts.append(inside)
    if not all(isinstance(thought, str) for thought in thoughts):
        raise RowRejected("wrong_roles", f"turn {place}: its reasoning is not text")
    if thought := next((thought for thought in thoughts if thought.strip()), ""):
        turn["reasoning_content"] = thought
    calls = turn.pop("tool_calls", None) or []
    if old := turn.pop("function_call", None):
        calls = [old]
    if calls:
        turn["tool_calls"] = _calls(calls, place)
    return turn


def _detailed_thought(details: Any, place: int, known: bool) -> str:
    """The thought in `reasoning_details`, which hold parts of it as text; an encrypted one cannot be known."""
    parts = details if isinstance(details, list) else [details]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("text")]
    if parts and not texts and not known:
        raise RowRejected("not_written", f"turn {place}: its reasoning_details hold no text (encrypted or summarized)")
    return "".join(str(text) for text in texts)


def _joined(parts: list[Any], place: int) -> tuple[str, str]:
    """Text and thought of a list of parts, as servers hand them to templates; other parts cannot be drafted."""
    texts: list[str] = []
    thoughts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        held = part.get(kind) if kind in ("text", "thinking", "reasoning") else None
        if isinstance(held, list):
            held, _ = _joined(held, place)
        if not isinstance(held, str):
            raise RowRejected("not_text", f"turn {place} has parts of another type than text")
        (texts if kind == "text" else thoughts).append(held)
    return "\n".join(texts), "\n".join(thoughts)


def _calls(calls: Any, place: int) -> list[JsonDict]:
    """Tool calls with arguments as objects: the protocol writes JSON text, which servers read before they render."""
    calls = _read_json(calls, f"turn {place}: tool_calls") if isinstance(calls, str) else calls
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RowRejected("wrong_roles", f"turn {place}: tool_calls is not a list of objects")
    return [_call(call, f"turn {place}") for call in calls]


def _call(call: Mapping[str, Any], where: str) -> JsonDict:
    """A call as the protocol nests it; some data sets write its function flat."""
    nested = isinstance(call.get("function"), Mapping)
    function = dict(call["function"]) if nested else {key: call[key] for key in _FLAT_CALL_KEYS if key in call}
    if not isinstance(function.get("name"), str):
        raise RowRejected("wrong_roles", f"{where}: a tool call names no function")
    arguments = function.pop("arguments", None) if "arguments" in function else function.pop("parameters", None)
    if isinstance(arguments, str):
        arguments = _read_json(arguments or "{}", f"{where}: the arguments of a tool call")
    around = {key: value for key, value in call.items() if key not in ("function", *_FLAT_CALL_KEYS)}
    return {"type": "function", **around, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _read_json(text: str, what: str) -> Any:
    try:
        value = msgspec.json.decode(text)
        check_depth(text, value)
        return value
    except (ValueError, RecursionError) as error:
        raise RowRejected("wrong_roles", f"{what} cannot be read as JSON ({error})") from error


def _tools(tools: Any) -> list[JsonDict] | None:
    if isinstance(tools, str) and tools.strip():
        tools = _read_json(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowRejected("wrong_roles", "tools is not a list of objects")
    return [dict(tool) for tool in tools]


def _has_no_loss(message: Mapping[str, Any]) -> bool:
    """Whether a turn says of itself that it is not learned: weight 0, or loss, train or training false."""
    return any(message.get(key) is not None and message[key] in (0, False) for key in _LOSS_KEYS)


def _has_token_ids(message: Mapping[str, Any]) -> bool:
    ids = message.get("token_ids")
    return isinstance(ids, list) and bool(ids) and all(type(item) is int for item in ids)


def _sharegpt(turns: Any) -> list[JsonDict]:
    if not isinstance(turns, list) or not turns:
        raise RowRejected("no_messages", "conversations is not a list of turns, or it is empty")
    messages: list[JsonDict] = []
    for place, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise RowRejected("wrong_roles", f"turn {place} is not an object")
        speaker = turn.get("from", turn.get("role"))
        role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise RowRejected("wrong_roles", f"turn {place} is from {speaker!r}")
        said = turn.get("value", turn.get("content"))
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        if speaker == "function_call":
            calls = _read_json(str(said), f"turn {place}: the call")
            others["tool_calls"] = calls if isinstance(calls, list) else [calls]
            said = ""
        messages.append({**others, "role": role, "content": said})
    return messages


def _pair(prompt: Any, answer: Any) -> list[JsonDict]:
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if not isinstance(asked, list) or not isinstance(said, list):
        raise RowRejected("wrong_roles", "prompt and response are not texts or lists of turns")
    return asked + said


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
    ids = row["input_ids"]
    if not isinstance(ids, Sequence) or any(type(item) is not int or item < 0 for item in ids):
        raise RowRejected("bad_tokens", "input_ids holds something that is not a token id")
    if row.get("loss_mask") is not None:
        mask = _flags(row, "loss_mask", len(ids))
    elif row.get("labels") is not None:
        mask = _labeled(ids, row["labels"])
    else:
        raise RowRejected("bad_tokens", f"input_ids without loss_mask (0 and 1) or labels ({NOT_LEARNED} where not)")
    if row.get("attention_mask") is not None:
        kept = _without_padding(_flags(row, "attention_mask", len(ids)))
        ids, mask = ids[kept], mask[kept]
    return ReadyTokens(ids, mask, tags)


def _flags(row: Mapping[str, Any], key: str, length: int) -> list[bool]:
    flags = row[key]
    if not isinstance(flags, Sequence) or len(flags) != length:
        raise RowRejected("bad_tokens", f"input_ids and {key} are not lists of one length")
    if any(item not in (0, 1) for item in flags):
        raise RowRejected("bad_tokens", f"{key} holds something other than 0 and 1")
    return [bool(item) for item in flags]


def _labeled(ids: Sequence[int], labels: Any) -> list[bool]:
    """Which tokens are learned: those whose label is their id, or whose label one place earlier is (shifted labels)."""
    if not isinstance(labels, Sequence) or len(labels) != len(ids):
        raise RowRejected("bad_tokens", "input_ids and labels are not lists of one length")
    for shift in (0, 1):
        moved = [NOT_LEARNED] * shift + list(labels[: len(labels) - shift])
        if all(label in (NOT_LEARNED, item) for label, item in zip(moved, ids, strict=True)):
            return [label != NOT_LEARNED for label in moved]
    raise RowRejected("bad_tokens", f"labels are neither {NOT_LEARNED} nor the ids, at their own or the next place")


def _without_padding(attended: Sequence[bool]) -> slice:
    """The tokens that are not padding, which may be on either side."""
    start = next((place for place, flag in enumerate(attended) if flag), 0)
    kept = slice(start, start + sum(attended))
    if not all(attended[kept]):
        raise RowRejected("bad_tokens", "attention_mask has zeros between its ones; give a row for each document")
    return kept


def tags_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The words in `tags` or `tag` of a row."""
    found = row.get("tags", row.get("tag", ()))
    listed = [found] if isinstance(found, str) else list(found) if isinstance(found, (list, tuple)) else []
    words = [f"{word}".replace(",", " ").strip() for word in listed]
    return tuple(dict.fromkeys(word for word in words if word))
