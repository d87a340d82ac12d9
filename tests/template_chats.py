"""Conversations of every kind, with marker words in each part of each turn, for `template_checker`."""

from __future__ import annotations

import json
from typing import Any

from template_checker import Chat, Turn, messages_of


def user(n: int) -> Turn:
    return Turn("user", f"Say usermark{n} please")


def says(n: int, **more: Any) -> Turn:
    return Turn("assistant", f"It is textmark{n} here.", **more)


def thinks(n: int, **more: Any) -> Turn:
    return says(n, thought=f"First thoughtmark{n}, then more.", **more)


def calls(n: int, number: int = 1, text: str = "", thought: str = "") -> Turn:
    made = tuple((f"callmark{n}x{k}", {"what": f"argmark{n}x{k}", "count": 3 + k}) for k in range(number))
    return Turn("assistant", text, thought, made)


def result(n: int) -> Turn:
    return Turn("tool", f"Found resultmark{n} there")


SYSTEM = Turn("system", "Be systemmark terse.")
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": f"toolmark{k}",
            "description": "Looks for words.",
            "parameters": {
                "type": "object",
                "properties": {"what": {"type": "string", "description": "words"}},
                "required": ["what"],
            },
        },
    }
    for k in range(2)
)


def chat(*turns: Turn, key: str | None = "reasoning_content", tools: bool = False, **row: Any) -> Chat:
    """A chat and its row: thoughts under a key, or (None) inside the content."""
    offered = TOOLS if tools else ()
    messages = messages_of(turns, key)
    for message, turn in zip(messages, turns, strict=True):
        if not turn.loss:
            message["weight"] = 0
    held = {"messages": messages, **({"tools": list(offered)} if tools else {}), **row}
    return Chat(turns, offered, held)


def _old_call() -> Chat:
    """A call as the protocol wrote it at first."""
    made = chat(user(0), calls(1), result(2), says(3), tools=True)
    messages = [dict(message) for message in made.row["messages"]]
    function = messages[1].pop("tool_calls")[0]["function"]
    messages[1] |= {"content": None, "function_call": {**function, "arguments": json.dumps(function["arguments"])}}
    messages[2] = {"role": "function", "content": messages[2]["content"]}
    return Chat(made.turns, made.tools, {**made.row, "messages": messages}, ids=False)


def _detailed() -> Chat:
    """A thought in reasoning_details."""
    made = chat(user(0), thinks(1))
    (asked, answer), thought = made.row["messages"], made.turns[1].thought
    told = {**answer, "reasoning_content": None, "reasoning_details": [{"type": "reasoning.text", "text": thought}]}
    return Chat(made.turns, (), {"messages": [asked, told]})


def _sharegpt() -> Chat:
    """A ShareGPT row with its system text beside the turns."""
    turns = (SYSTEM, user(0), says(1), user(2), says(3))
    speakers = {"user": "human", "assistant": "gpt"}
    told = [{"from": speakers[turn.role], "value": turn.text} for turn in turns[1:]]
    return Chat(turns, (), {"system": SYSTEM.text, "conversations": told})


CHATS = {
    "plain": chat(user(0), says(1)),
    "system": chat(SYSTEM, user(0), says(1)),
    "several turns": chat(user(0), says(1), user(2), says(3), user(4), says(5)),
    "system, several turns": chat(SYSTEM, user(0), says(1), user(2), says(3)),
    "ShareGPT with system": _sharegpt(),
    "question at the end": chat(user(0), says(1), user(2)),
    "two answers in a row": chat(user(0), says(1), says(2)),
    "greeting first": chat(says(0), user(1), says(2)),
    "a turn without loss": chat(user(0), says(1, loss=False), user(2), says(3)),
    "thought": chat(user(0), thinks(1)),
    "thought, system": chat(SYSTEM, user(0), thinks(1)),
    "thought inside the content": chat(user(0), thinks(1), key=None),
    "thought as `reasoning`": chat(user(0), thinks(1), key="reasoning"),
    "thought in reasoning_details": _detailed(),
    "thoughts, several turns": chat(user(0), thinks(1), user(2), thinks(3)),
    "thoughts inside, several turns": chat(user(0), thinks(1), user(2), thinks(3), key=None),
    "thought in the last turn only": chat(user(0), says(1), user(2), thinks(3)),
    "thought in the first turn only": chat(user(0), thinks(1), user(2), says(3)),
    "call at the end": chat(user(0), calls(1), tools=True),
    "call, result, answer": chat(user(0), calls(1), result(2), says(3), tools=True),
    "old function_call": _old_call(),
    "two calls": chat(user(0), calls(1, 2), result(2), result(3), says(4), tools=True),
    "three calls": chat(user(0), calls(1, 3), result(2), result(3), result(4), says(5), tools=True),
    "text beside a call": chat(user(0), calls(1, text="I look textmark1 up."), result(2), says(3), tools=True),
    "calls in a row": chat(user(0), calls(1), result(2), calls(3), result(4), says(5), tools=True),
    "call, then another question": chat(user(0), calls(1), result(2), says(3), user(4), says(5), tools=True),
    "thought beside a call": chat(
        user(0), calls(1, thought="I need thoughtmark1 for it."), result(2), thinks(3), tools=True
    ),
    "thought and text beside a call": chat(
        user(0), calls(1, text="I look textmark1 up.", thought="I need thoughtmark1."), result(2), says(3), tools=True
    ),
    "system, tools": chat(SYSTEM, user(0), calls(1), result(2), says(3), tools=True),
}
"""Kind of conversation → one of it."""
