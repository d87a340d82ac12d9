"""Prompts for evaluation, rendered as a server renders them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.data.conversation import Conversation, SetAside, read_row
from paceline.data.rendering import Renderer
from paceline.data.sources import read_rows
from paceline.data.tags import conversation_tags
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import DataError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to answer.

    Attributes:
        id: the row's own id, or `file:line`.
        ids: token ids, generation prompt included.
        text: what the ids were read from.
        reference: the answer that stands in the data, or None.
        tags: words by which reports are split.
    """

    id: str
    ids: list[int]
    text: str
    reference: str | None
    tags: tuple[str, ...]


def render_prompts(
    files: Sequence[str],
    tokenizer_path: str,
    limit: int | None,
    *,
    thinking: str = "auto",
    trust_remote_code: bool = False,
) -> list[Prompt]:
    """Prompts of data files: everything before the last assistant turn, or the whole row where it ends with a question.

    Args:
        files: data files or folders of such.
        tokenizer_path: of the target.
        limit: at most this many, the first ones; None = all.
        thinking: as `data.thinking`; auto leaves the template's own default.
        trust_remote_code: whether code that comes with the target may run.

    Raises:
        DataError: no file, no tokenizer, no chat template, or no row with a question; rows without one are passed over.
    """
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
    renderer = Renderer(tokenizer, thinking)
    prompts: list[Prompt] = []
    passed_over: list[str] = []
    for where, values in read_rows(files, "data.heldout"):
        if limit is not None and len(prompts) >= limit:
            break
        try:
            if isinstance(values, SetAside):
                raise values
            row = read_row(values, answered=False)
            if not isinstance(row, Conversation):
                raise SetAside("no_messages", "no chat")
            end, reference = _last_question(row)
            text = renderer.texts(row, [end], renderer.variables(row)[0], generation=True)[0]
        except SetAside as found:
            passed_over.append(f"{where} ({found.reason}{': ' + found.detail if found.detail else ''})")
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append(Prompt(row.row_id or where, ids, text, reference, (*row.tags, *conversation_tags(row))))
    if not prompts:
        example = f"; for example {passed_over[0]}" if passed_over else ""
        raise DataError(f"{', '.join(files)}: no row with a question to evaluate{example}")
    return prompts


def _last_question(row: Conversation) -> tuple[int, str | None]:
    """Turns before the last answer (or all of them), and that answer."""
    messages = row.messages
    if messages[-1]["role"] != "assistant":
        return len(messages), None
    asked = next(place for place, turn in enumerate(messages) if turn["role"] == "user")
    if len(messages) - 1 <= asked:
        raise SetAside("no_assistant", "nothing is asked before the last answer")
    content = messages[-1].get("content")
    return len(messages) - 1, content if isinstance(content, str) else None
