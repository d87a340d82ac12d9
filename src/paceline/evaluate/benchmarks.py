"""Published prompt sets for evaluation, read from local files in the formats in which they are published.

`gsm8k:PATH` names a file of the set GSM8K, and so on for `SETS`; files of every kind that `data` reads. A row that is
not of the set's format is an error: it is another file than the one that was meant.

Math and code sets wrap the row's text in a sentence of ours that says what is wanted; absolute acceptance depends on
such wording, so compare drafters under the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import suggestion
from paceline.data.readers import read_rows
from paceline.data.rows import RowRejected
from paceline.errors import DataError

_MATH = "{}\n\nThink it through step by step and end with the final answer in \\boxed{{}}."
_FUNCTION = "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```"
_PROGRAM = "{}\n\nWrite it in Python. These tests must pass:\n\n```python\n{}\n```"


@dataclass(frozen=True, slots=True)
class Question:
    """A row of a prompt set.

    Attributes:
        id: the row's own, or none.
        turns: what the user says, in order; the second is said after the first was answered.
        reference: the published answer, where there is one.
        tags: the set, and the set with its categories.
    """

    id: str | None
    turns: tuple[str, ...]
    reference: str | None
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A published set.

    Attributes:
        title: as it is published.
        fields: that a row has, for messages.
        question: a row as a question; raises `RowFormatError`.
    """

    title: str
    fields: str
    question: Callable[[Mapping[str, Any]], Question]


class RowFormatError(Exception):
    """What is wrong with a row."""


def _gsm8k(row: Mapping[str, Any]) -> Question:
    return Question(None, (_MATH.format(_text(row, "question")),), _text(row, "answer"), ("gsm8k",))


def _math_500(row: Mapping[str, Any]) -> Question:
    level = str(row.get("level", "")).removeprefix("Level ")
    categories = (f"math-500:{_word(_text(row, 'subject'))}", *([f"math-500:level-{_word(level)}"] if level else []))
    turns = (_MATH.format(_text(row, "problem")),)
    return Question(_id(row, "unique_id"), turns, _text(row, "solution"), ("math-500", *categories))


def _humaneval(row: Mapping[str, Any]) -> Question:
    _text(row, "entry_point")
    turns = (_FUNCTION.format(_text(row, "prompt").rstrip()),)
    return Question(_id(row, "task_id"), turns, _text(row, "canonical_solution"), ("humaneval",))


def _mbpp(row: Mapping[str, Any]) -> Question:
    """`text` in the full set, `prompt` in the sanitized one."""
    asked = _text(row, "text" if "text" in row else "prompt")
    turns = (_PROGRAM.format(asked, "\n".join(_texts(row, "test_list"))),)
    task = _id(row, "task_id")
    return Question(f"mbpp/{task}" if task else None, turns, _text(row, "code"), ("mbpp",))


def _mt_bench(row: Mapping[str, Any]) -> Question:
    """`turns` in question.jsonl, `prompt` in the hub's Parquet file."""
    turns = _texts(row, "turns" if "turns" in row else "prompt")
    number = _id(row, "question_id") or _id(row, "prompt_id")
    tags = ("mt-bench", f"mt-bench:{_word(_text(row, 'category'))}")
    return Question(f"mt-bench/{number}" if number else None, tuple(turns), None, tags)


SETS = {
    "gsm8k": PromptSet("GSM8K", "question, answer", _gsm8k),
    "math-500": PromptSet("MATH-500", "problem, solution, subject, level", _math_500),
    "humaneval": PromptSet("HumanEval", "prompt, canonical_solution, entry_point", _humaneval),
    "mbpp": PromptSet("MBPP", "text (or prompt), code, test_list", _mbpp),
    "mt-bench": PromptSet("MT-Bench", "turns (or prompt), category", _mt_bench),
}
"""Name → set."""


def set_of(name: str) -> tuple[str, str] | None:
    """Set and path in a name such as ``gsm8k:test.jsonl``; None for the name or address of an ordinary data file.

    Raises:
        DataError: it looks like the name of a set, but there is none.
    """
    word, colon, path = name.partition(":")
    if colon and word.lower() in SETS:
        return word.lower(), path
    if colon and word != "hub" and "/" not in word and not path.startswith("//") and not Path(name).exists():
        raise DataError(f"{name}: no prompt set is called {word}; {suggestion(word, list(SETS))}")
    return None


def read_questions(name: str, path: str) -> Iterator[tuple[str, Question]]:
    """`file:line` and question of every row of a set's file.

    Args:
        name: of the set.
        path: of the file.

    Raises:
        DataError: no such file, or a row that is not of the set's format.
    """
    known, found = SETS[name], False
    for where, row in read_rows([path], name):
        found = True
        try:
            if isinstance(row, RowRejected):
                raise RowFormatError(f"it cannot be read as JSON ({row.detail})")
            if not isinstance(row, Mapping):
                raise RowFormatError(f"it is a {type(row).__name__}, not an object")
            yield where, known.question(row)
        except RowFormatError as error:
            raise DataError(f"{where}: not a row of {known.title}: {error}; a row has {known.fields}") from None
    if not found:
        raise DataError(f"{name}:{path}: the file is empty; give the set's file as it is published")


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise RowFormatError(f"it has no text under {key!r} (its keys: {', '.join(map(str, row)) or 'none'})")
    return value


def _texts(row: Mapping[str, Any], key: str) -> list[str]:
    value = row.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item.strip() for item in value):
        raise RowFormatError(f"it has no list of texts under {key!r} (its keys: {', '.join(map(str, row)) or 'none'})")
    return value


def _id(row: Mapping[str, Any], key: str) -> str | None:
    value = row.get(key)
    return None if value is None else str(value)


def _word(text: str) -> str:
    return "-".join(text.lower().replace("&", " ").replace(",", " ").split())
