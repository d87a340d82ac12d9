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
        inline: where the thought is inside the content: what opens it (or ""), the thought as written, and what
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
    """What of a turn its rendering does not hold, or holds twice; "" where it holds each part once.

    A part is missing where it occurs less often than in all parts together: short texts occur inside others.
    """
    thought, text = said.thought.strip(), said.text.strip()
    names = [call["function"]["name"] for call in said.calls]
    leaves = [leaf for call in said.calls for leaf in _leaves(call["function"]["arguments"])]
    for what, part in (("thought", thought), ("text", text)):
        if part and written.count(part) < thought.count(part) + text.count(part):
            return f"the {what}"
        # In short ones the template's own words may occur.
        if len(part) >= _LONG and written.count(part) > "\0".join([thought, text, *map(str, leaves)]).count(part):
            return f"the {what} once (it is written twice)"
    for name in names:
        if written.count(name) < sum(part.count(name) for part in (thought, text, *names)):
            return f"a call of {name}"
    for leaf in leaves:
        if not any(form in written for form in _forms(leaf)):
            return f"an argument of a call ({str(leaf)[:40]!r})"
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
