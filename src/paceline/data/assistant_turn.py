"""What an assistant turn says: its thought, its text and its calls; and whether a rendering holds all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.types import JsonDict

_INLINE = (
    re.compile(r"(?P<open>\s*<think>)?(?P<thought>.*?)(?P<close></think>\s*)(?P<text>.*)", re.DOTALL),
    re.compile(
        r"(?P<open>\s*<(?P<tag>thinking|thought|reasoning|seed:think)>)(?P<thought>.*?)(?P<close></(?P=tag)>\s*)"
        r"(?P<text>.*)",
        re.DOTALL,
    ),
    re.compile(r"(?P<open>\s*\[THINK\])?(?P<thought>.*?)(?P<close>\[/THINK\]\s*)(?P<text>.*)", re.DOTALL),
    re.compile(r"(?P<open>\s*<\|channel>thought\n)(?P<thought>.*?)(?P<close>\s*<channel\|>\s*)(?P<text>.*)", re.DOTALL),
    re.compile(
        r"(?P<open>\s*<\|channel\|>analysis<\|message\|>)(?P<thought>.*?)"
        r"(?P<close><\|end\|><\|start\|>assistant<\|channel\|>final<\|message\|>)(?P<text>.*)",
        re.DOTALL,
    ),
)
"""How targets write a thought before the text, where no server took the two apart. What opens a think block may be
in the generation prompt instead."""
_LONG = 16
"""Characters from which a text that is found twice is taken for written twice."""


@dataclass(frozen=True, slots=True)
class Said:
    """The parts of an assistant turn.

    Attributes:
        thought: its reasoning, "" where it has none.
        text: its answer in text.
        calls: its tool calls, arguments as objects.
        inline: where the thought stands inside the content: what opens it (or ""), the thought as written, and what
            closes it with the white space behind; else None.
    """

    thought: str
    text: str
    calls: tuple[JsonDict, ...]
    inline: tuple[str, str, str] | None = None


def said_by_place(messages: Sequence[JsonDict]) -> dict[int, Said]:
    """The assistant turns of a conversation: place → its parts."""
    return {place: said_in(turn) for place, turn in enumerate(messages) if turn["role"] == "assistant"}


def said_in(message: Mapping[str, Any]) -> Said:
    """The parts of an assistant turn of a row."""
    content, calls = message["content"], tuple(message.get("tool_calls") or ())
    if thought := message.get("reasoning_content"):
        return Said(thought, content, calls)
    if "</" in content or "[/THINK]" in content or "<|channel" in content:
        for form in _INLINE:
            if found := form.fullmatch(content):
                inline = (found["open"] or "", found["thought"], found["close"])
                return Said(found["thought"].strip(), found["text"], calls, inline)
    return Said("", content, calls)


def not_written(said: Said, written: str) -> str:
    """What of a turn its rendering does not hold, or holds twice; "" where it holds each part once."""
    start = 0
    for name, part in (("thought", said.thought.strip()), ("text", said.text.strip())):
        found = written.find(part, start)
        if part and found < 0:
            found = written.find(part)
        if found < 0:
            return f"the {name}"
        start = found + len(part) if name == "thought" else start
    return _lost_call(said.calls, written) or _doubled(said, written)


def _lost_call(calls: tuple[JsonDict, ...], written: str) -> str:
    start = 0
    for number, call in enumerate(calls, start=1):
        name = call["function"]["name"]
        start = written.find(name, start)
        if start < 0:
            return f"call {number} of {len(calls)} ({name})"
        start += len(name)
        for value in _leaves(call["function"]["arguments"]):
            if not any(form in written[start:] for form in _forms(value)):
                return f"an argument of call {number} ({name})"
    return ""


def _doubled(said: Said, written: str) -> str:
    own = "\0".join([said.thought, said.text, *(str(leaf) for call in said.calls for leaf in _leaves(call))])
    for name, part in (("thought", said.thought.strip()), ("text", said.text.strip())):
        if len(part) >= _LONG and written.count(part) > own.count(part):
            return f"the {name} once (it is written twice)"
    return ""


def _leaves(value: Any) -> Iterator[Any]:
    """The texts and numbers in the arguments of a call."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, (str, int, float)) and not isinstance(value, bool):
        yield value


def _forms(value: Any) -> Iterator[str]:
    """How templates write a text or number: as it is, or as JSON."""
    yield str(value).strip()
    for ascii_only in (False, True):
        yield json.dumps(value, ensure_ascii=ascii_only).strip('"')
