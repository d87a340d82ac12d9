"""Chats of every kind with what every family's template does: right, or left out with its reason; never wrong.

The table of all of them: python -m pytest tests/data/test_served_turn.py -k table -s
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from paceline.config import DataConfig
from paceline.data.assistant_turn import Said
from paceline.data.rows import RowRejected, read_row
from paceline.data.served_turn import empty_thought
from paceline.data.tokenize_rows import RowTokenizer
from template_chats import CHATS
from template_checker import Chat, Prepared, Verdict, judge
from template_constructs import CONSTRUCTS

EXACT = {
    ("Qwen3:", "thought"): ["<think>\nFirst thoughtmark1, then more.\n</think>\n\nIt is textmark1 here.<|im_end|>"],
    ("Qwen3:", "plain"): ["It is textmark1 here.<|im_end|>"],
    ("Qwen3:", "thought in the last turn only"): [
        "It is textmark1 here.<|im_end|>",
        "<think>\nFirst thoughtmark3, then more.\n</think>\n\nIt is textmark3 here.<|im_end|>",
    ],
    ("Qwen3.5", "thought"): ["First thoughtmark1, then more.\n</think>\n\nIt is textmark1 here.<|im_end|>"],
    ("QwQ", "thought"): ["First thoughtmark1, then more.\n</think>\n\nIt is textmark1 here.<|im_end|>"],
    ("QwQ", "plain"): ["It is textmark1 here.<|im_end|>"],
    ("Gemma 4", "thought"): [
        "<|channel>thought\nFirst thoughtmark1, then more.\n<channel|>It is textmark1 here.<turn|>"
    ],
    ("Gemma 4", "call, result, answer"): [
        '<|tool_call>call:callmark1x0{"what": "argmark1x0", "count": 3}<tool_call|><|tool_response>',
        "It is textmark3 here.<turn|>",
    ],
    ("Mistral v0.3", "system"): [" It is textmark1 here.</s>"],
    ("Mistral with", "thought"): ["[THINK]First thoughtmark1, then more.[/THINK]It is textmark1 here.</s>"],
    ("DeepSeek V3.1", "thought"): ["First thoughtmark1, then more.</think>It is textmark1 here.<|eos|>"],
    ("DeepSeek R1", "thought inside the content"): [
        "First thoughtmark1, then more.\n</think>\n\nIt is textmark1 here.<|eos|>"
    ],
    ("DeepSeek R1", "thought beside a call"): [
        "I need thoughtmark1 for it.\n</think>\n\n<|call|>"
        '{"name": "callmark1x0", "arguments": {"what": "argmark1x0", "count": 3}}<|eos|>',
        "First thoughtmark3, then more.\n</think>\n\nIt is textmark3 here.<|eos|>",
    ],
    ("gpt-oss", "thought beside a call"): [
        "<|channel|>analysis<|message|>I need thoughtmark1 for it.<|end|><|start|>assistant to=functions.callmark1x0"
        '<|channel|>commentary json<|message|>{"what": "argmark1x0", "count": 3}<|call|>',
        "<|channel|>analysis<|message|>First thoughtmark3, then more.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is textmark3 here.<|return|>",
    ],
    ("GLM 4.5", "call, result, answer"): [
        "\n<tool_call>callmark1x0\n<arg_key>what</arg_key>\n<arg_value>argmark1x0</arg_value>"
        "\n<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>",
        "\nIt is textmark3 here.<|user|>",
    ],
    ("GLM 4.5", "several turns"): [f"\nIt is textmark{n} here.<|user|>" for n in (1, 3, 5)],
    ("Kimi K2 Thinking", "thought"): ["<think>First thoughtmark1, then more.</think>It is textmark1 here.<|im_end|>"],
    ("Kimi K2 Thinking", "call at the end"): [
        '<|call_begin|>{"name": "callmark1x0", "arguments": {"what": "argmark1x0", "count": 3}}<|call_end|><|im_end|>'
    ],
    ("Command R7B", "thought"): [
        "<|START_THINKING|>First thoughtmark1, then more.<|END_THINKING|>"
        "<|START_RESPONSE|>It is textmark1 here.<|END_RESPONSE|><|END_TURN|>"
    ],
    ("white space", "call, result, answer"): [
        '<tool_call>\n{"name": "callmark1x0", "arguments": {"what": "argmark1x0", "count": 3}}\n</tool_call><|im_end|>',
        "It is textmark3 here.<|im_end|>",
    ],
}
"""Construct (its beginning) and kind of chat → the supervised texts, where more than words matters."""
NO_END = {"no_closing_token", "closing_is_no_end_token"}


def prepared(tokenizer: RowTokenizer, chat: Chat) -> Prepared:
    try:
        samples = tokenizer.samples(read_row(chat.row))
    except RowRejected as found:
        return Prepared(reason=found.reason, detail=found.detail)
    return Prepared(
        [(sample.ids.tolist(), sample.spans.reshape(-1, 2).tolist()) for sample in samples],
        no_end=any(NO_END & set(sample.notes) for sample in samples),
    )


@cache
def tokenizer_of(name: str) -> RowTokenizer:
    with TemporaryDirectory() as folder:
        CONSTRUCTS[name].save(Path(folder))
        return RowTokenizer(folder, False, DataConfig())


@cache
def verdicts(name: str) -> dict[str, Verdict]:
    """Kind of chat → verdict, of one construct."""
    construct, tokenizer = CONSTRUCTS[name], tokenizer_of(name)
    known = tokenizer.tokenizer
    ends = [known.convert_tokens_to_ids(token) for token in (*construct.ends, construct.family.eos)]
    return {
        kind: judge(
            known,
            chat,
            prepared(tokenizer, chat),
            ends=ends,
            modes=[(construct.on if chat.thinks else construct.off) or {}],
        )
        for kind, chat in CHATS.items()
    }


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_every_chat_is_right_or_left_out_with_its_reason(name: str) -> None:
    found = verdicts(name)
    assert {kind: verdict.why for kind, verdict in found.items() if verdict.kind == "wrong"} == {}
    left_out = {kind: verdict.why.split(":")[0] for kind, verdict in found.items() if verdict.kind == "set aside"}
    assert left_out == {kind: reason for reason, kinds in CONSTRUCTS[name].left_out.items() for kind in kinds}


@pytest.mark.parametrize(("start", "kind"), EXACT)
def test_supervised_text_is_what_the_target_writes(start: str, kind: str) -> None:
    (name,) = (name for name in CONSTRUCTS if name.startswith(start))
    found = prepared(tokenizer_of(name), CHATS[kind])
    decode = tokenizer_of(name).tokenizer.decode
    assert [decode(ids[a:b]) for ids, spans in found.samples for a, b in spans] == EXACT[start, kind]


@pytest.mark.parametrize(
    ("answer", "text", "length"),
    [
        ("<think>\n\n</think>\n\n**Bold**", "**Bold**", len("<think>\n\n</think>\n\n")),
        ("</think>Hello", "Hello", len("</think>")),
        ("◁why▷◁/why▷Hello", "Hello", len("◁why▷◁/why▷")),
        ("<why></why><call>add", "", len("<why></why>")),
        ("[why][/why][CALL]add", "", len("[why][/why]")),
        ("<think></think>other", "Hello", 0),
        ("Hello", "Hello", 0),
    ],
)
def test_an_empty_thought_is_as_long_as_its_marks(answer: str, text: str, length: int) -> None:
    calls = () if text else ({"function": {"name": "add", "arguments": {}}},)
    assert empty_thought(Said("", text, calls), answer) == length


def rows_of_table() -> Iterator[str]:
    letters = {"right": "+", "set aside": "o", "wrong": "WRONG"}
    yield "kinds of chats: " + ", ".join(f"{number} {kind}" for number, kind in enumerate(CHATS, start=1))
    for name in CONSTRUCTS:
        found = verdicts(name)
        reasons = sorted({verdict.why.split(":")[0] for verdict in found.values() if verdict.kind == "set aside"})
        yield (
            "".join(letters[verdict.kind] for verdict in found.values())
            + f"  {name}"
            + (f" (left out: {', '.join(reasons)})" if reasons else "")
        )
    kinds = [verdict.kind for name in CONSTRUCTS for verdict in verdicts(name).values()]
    yield f"+ right {kinds.count('right')}, o left out {kinds.count('set aside')}, wrong {kinds.count('wrong')}"


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = list(rows_of_table())
    print("\n" + "\n".join(lines))
    assert lines[-1].endswith("wrong 0")
