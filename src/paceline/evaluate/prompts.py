"""Prompts for evaluation, rendered as a server renders them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.data.chat_template import Renderer
from paceline.data.files import find_files
from paceline.data.readers import read_rows
from paceline.data.rows import Conversation, RowRejected, read_row
from paceline.data.served_turn import served_prompt
from paceline.data.tags import conversation_tags
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import DataError
from paceline.evaluate.benchmarks import Question, read_questions, set_of
from paceline.text import absent


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to answer.

    Attributes:
        id: the row's own id, or `file:line`.
        ids: token ids, generation prompt included.
        text: what the ids were read from.
        reference: the answer in the data, or None.
        tags: words by which reports are split.
        asked: the turns before the answer.
        later: what the user says after the answer, turn by turn.
        variables: of the chat template that a server must be given to send this prompt, and that no setting says: the
            row's answers decided them.
    """

    id: str
    ids: list[int]
    text: str
    reference: str | None
    tags: tuple[str, ...]
    asked: Conversation
    later: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


class PromptRenderer:
    """Renders prompts for one target.

    Args:
        tokenizer_path: of the target.
        thinking: as `data.thinking`; with auto, rows are asked in the mode that they are trained in, and questions of
            prompt sets in the template's own default.
        switches: as `data.template_switches`.
        trust_remote_code: whether code that comes with the target may run.

    Raises:
        DataError: no tokenizer or no chat template.
    """

    def __init__(
        self,
        tokenizer_path: str,
        thinking: str = "auto",
        switches: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self._tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
        self._renderer = Renderer(self._tokenizer, thinking, switches)

    def of_row(self, where: str, values: object) -> Prompt:
        """Everything before the last assistant turn, or the whole row where it ends with a question.

        Raises:
            RowRejected: the row holds no question.
        """
        if isinstance(values, RowRejected):
            raise values
        row = read_row(values, answered=False)
        if not isinstance(row, Conversation):
            raise RowRejected("no_messages", "no chat")
        end, reference = _last_question(row)
        tags = (*row.tags, *conversation_tags(row))
        return self._prompt(row.row_id or where, row, end, reference, tags)

    def of_question(self, where: str, question: Question) -> Prompt:
        """The first turn of a question of a prompt set; the others stand in `later`."""
        asked = Conversation([{"role": "user", "content": question.turns[0]}])
        tags = (*question.tags, f"{question.tags[0]}:turn-1") if len(question.turns) > 1 else question.tags
        later = question.turns[1:]
        return replace(self._prompt(question.id or where, asked, 1, question.reference, tags), later=later)

    def next_turn(self, prompt: Prompt, answer: str) -> Prompt:
        """The prompt of the user's next turn, after an answer to the one before."""
        said = [{"role": "assistant", "content": answer}, {"role": "user", "content": prompt.later[0]}]
        asked = replace(prompt.asked, messages=[*prompt.asked.messages, *said])
        turn = sum(message["role"] == "user" for message in asked.messages)
        *tags, last = prompt.tags
        tags = [*tags, f"{last.rpartition('-')[0]}-{turn}"]
        name = f"{prompt.id.partition('#')[0]}#turn-{turn}"
        end = len(asked.messages)
        return replace(self._prompt(name, asked, end, None, tuple(tags)), later=prompt.later[1:])

    def _prompt(self, name: str, row: Conversation, end: int, reference: str | None, tags: tuple[str, ...]) -> Prompt:
        text, variables = served_prompt(row, end, self._renderer)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        # The mode of a chat stays the same over its turns.
        asked = replace(row, messages=row.messages[:end], template=variables, served=True)
        needed = self._renderer.found_by_content(row, variables)
        return Prompt(name, ids, text, reference, tags, asked, variables=needed)


def render_prompts(files: Sequence[str], renderer: PromptRenderer, limit: int | None) -> list[Prompt]:
    """Prompts of data files and prompt sets, one of each in turn.

    Args:
        files: data files or folders of such, or files of published sets (`gsm8k:PATH`, see `prompt_sets`).
        renderer: for the target.
        limit: at most this many, the first ones; None = all.

    Raises:
        DataError: no file, no row with a question, or a row that is not of its set's format; rows of data files
            without a question are passed over.
    """
    sets = [(name, set_of(name)) for name in files]
    _check_files([name for name, known in sets if known is None], [known for _, known in sets if known is not None])
    passed_over: list[str] = []
    open_files = [_of_set(renderer, *known) if known else _of_file(renderer, name, passed_over) for name, known in sets]
    prompts: list[Prompt] = []
    while open_files and (limit is None or len(prompts) < limit):
        file = open_files.pop(0)
        prompt = next(file, None)
        if prompt is not None:
            prompts.append(prompt)
            open_files.append(file)
    if not prompts:
        example = f"; for example {passed_over[0]}" if passed_over else ""
        raise DataError(f"{', '.join(files)}: no row with a question to evaluate{example}")
    return prompts


def with_later_turns(
    prompts: Sequence[Prompt], renderer: PromptRenderer, answer: Callable[[list[int]], str | None], limit: int | None
) -> list[Prompt]:
    """The prompts, each followed by those of its user's later turns.

    Args:
        prompts: from `render_prompts`.
        renderer: for the same target.
        answer: answers token ids; called for turns after which another is asked. None where it cannot: then none is.
        limit: at most this many prompts in all; None = all.
    """
    found: list[Prompt] = []
    for prompt in prompts:
        if limit is not None and len(found) >= limit:
            break
        found.append(prompt)
        while found[-1].later and (limit is None or len(found) < limit):
            said = answer(found[-1].ids)
            if said is None:
                break
            found.append(renderer.next_turn(found[-1], said))
    return found


def _check_files(names: Sequence[str], sets: Sequence[tuple[str, str]]) -> None:
    """Refuse files that are not there, all at once."""
    errors = [f"prompts: {name}:{path}: {absent(path, 'file')}" for name, path in sets if not Path(path).exists()]
    try:
        if names or not sets:
            find_files(names, "prompts")
    except DataError as error:
        raise DataError(*error.errors, *errors) from None
    if errors:
        raise DataError(*errors)


def _of_set(renderer: PromptRenderer, name: str, path: str) -> Iterator[Prompt]:
    for where, question in read_questions(name, path):
        yield renderer.of_question(where, question)


def _of_file(renderer: PromptRenderer, name: str, passed_over: list[str]) -> Iterator[Prompt]:
    for where, values in read_rows([name], "prompts"):
        try:
            yield renderer.of_row(where, values)
        except RowRejected as found:
            passed_over.append(f"{where} ({found.reason}{': ' + found.detail if found.detail else ''})")


def _last_question(row: Conversation) -> tuple[int, str | None]:
    """Turns before the last answer (or all of them), and that answer."""
    messages = row.messages
    if messages[-1]["role"] != "assistant":
        return len(messages), None
    asked = next(place for place, turn in enumerate(messages) if turn["role"] == "user")
    if len(messages) - 1 <= asked:
        raise RowRejected("no_assistant", "nothing is asked before the last answer")
    content = messages[-1].get("content")
    return len(messages) - 1, content if isinstance(content, str) else None
