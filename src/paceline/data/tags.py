"""Words by which reports are split: those of the row, and what can be seen in it."""

from __future__ import annotations

import re

from paceline.data.assistant_turn import said_in
from paceline.data.rows import Conversation, PlainText, Row

_SCRIPTS = {
    "script:chinese": re.compile(r"[\u4e00-\u9fff]"),
    "script:japanese": re.compile(r"[\u3040-\u30ff]"),
    "script:korean": re.compile(r"[\uac00-\ud7af]"),
    "script:cyrillic": re.compile(r"[\u0400-\u04ff]"),
    "script:arabic": re.compile(r"[\u0600-\u06ff]"),
    "script:devanagari": re.compile(r"[\u0900-\u097f]"),
    "script:latin": re.compile(r"[A-Za-z\u00c0-\u024f]"),
}
_LOOKED_AT = 2000
"""Characters of the answers that the script is judged by."""


def conversation_tags(row: Row) -> tuple[str, ...]:
    """Tags that can be seen: thinking or not, tools, system, several turns, and the script of the answers."""
    if isinstance(row, PlainText):
        return ("plain-text", script(row.text))
    if not isinstance(row, Conversation):
        return ()
    answers = [turn for turn in row.messages if turn["role"] == "assistant"]
    found = ["thinking" if any(said_in(turn).thought for turn in answers) else "no-thinking"]
    if row.tools or any(turn.get("tool_calls") for turn in answers):
        found.append("tools")
    if row.messages[0]["role"] in ("system", "developer"):
        found.append("system")
    if len(answers) > 1:
        found.append("multi-turn")
    found.append(script(" ".join(str(turn.get("content", "")) for turn in answers)))
    return tuple(found)


def script(text: str) -> str:
    """The script that most letters of the text's beginning are written in; Japanese text also holds Chinese letters."""
    head = text[:_LOOKED_AT]
    if head.isascii():
        return "script:latin"
    counts = {name: len(pattern.findall(head)) for name, pattern in _SCRIPTS.items()}
    if counts["script:japanese"] * 5 > counts["script:chinese"]:
        counts["script:japanese"] += counts["script:chinese"]
    name, most = max(counts.items(), key=lambda item: item[1])
    return name if most else "script:other"
