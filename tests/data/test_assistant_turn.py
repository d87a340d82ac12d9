"""What a turn says, and whether a rendering holds all of it."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.data.assistant_turn import not_written, said_in


def turn(content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("content", "thought", "text"),
    [
        ("<think>\nwhy\n</think>\n\nHello.", "why", "Hello."),
        ("why\n</think>\n\nHello.", "why", "Hello."),
        ("<think>\n\n</think>\n\nHello.", "", "Hello."),
        ("[THINK]why[/THINK]Hello.", "why", "Hello."),
        ("<thought>why</thought>Hello.", "why", "Hello."),
        ("<|channel>thought\nwhy\n<channel|>Hello.", "why", "Hello."),
        (
            "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
            "why",
            "Hello.",
        ),
        ("A </reasoning> tag.", "", "A </reasoning> tag."),
        ("a </b>", "", "a </b>"),
    ],
)
def test_a_thought_inside_the_content_is_taken_apart(content: str, thought: str, text: str) -> None:
    said = said_in(turn(content))
    assert (said.thought, said.text) == (thought, text)
    assert said.inline is None or "".join(said.inline) + said.text == content


@pytest.mark.parametrize(
    ("message", "written", "lost"),
    [
        (turn("Hello."), "Hello.<end>", ""),
        (turn(" Hello.\n"), "Hello.<end>", ""),
        (turn("Hello."), "<end>", "the text"),
        (turn("Hello.", reasoning_content="why"), "Hello.<end>", "the thought"),
        (turn("4", reasoning_content="2 + 2 is 4"), "<think>2 + 2 is 4</think>4", ""),
        (turn("It is four.", reasoning_content="So it is four."), "<think>So it is four.</think>", "the text"),
        (turn("it is four.", reasoning_content="So it is four."), "<think>So it is four.</think>", "the text"),
        (turn("A long enough text.", reasoning_content="A long enough text."), "A long enough text.", "the thought"),
        (turn("A long enough text."), "A long enough text.A long enough text.", "the text once (it is written twice)"),
        (turn(tool_calls=[call("add", a=1)]), '{"name": "add", "arguments": {"a": 1}}', ""),
        (turn(tool_calls=[call("add", a='x\n"y"')]), 'add(a="x\\n\\"y\\"")', ""),
        (turn(tool_calls=[call("add", a="é")]), "add(a=\\u00e9)", ""),
        (turn(tool_calls=[call("add", a={"b": ["deep"]})]), "add()", "an argument of a call ('deep')"),
        (turn(tool_calls=[call("add"), call("add")]), "add()", "a call of add"),
        (turn("add it", tool_calls=[call("add")]), "add it", "a call of add"),
        (turn(tool_calls=[call("add"), call("add_all")]), "add() add_all()", ""),
        (turn(tool_calls=[call("add"), call("add_all")]), "add_all()", "a call of add"),
        (turn(tool_calls=[call("add", a=None, b=True)]), "add()", ""),
    ],
)
def test_what_a_rendering_does_not_hold_is_named(message: dict[str, Any], written: str, lost: str) -> None:
    assert not_written(said_in(message), written) == lost
