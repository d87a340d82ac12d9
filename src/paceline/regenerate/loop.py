"""Answers to prompts by the target itself: a drafter should learn the text that its target writes.

Rows in `messages` form go in. For each user turn the conversation so far is answered, in this process (`local`) or by
a server (`client`), and the answer is added before the next turn is asked. Assistant turns that came with a row are
replaced; those that call tools, and the tools' results, stay as they are. Rows are written as JSON lines as they are
finished, each flushed, so a run that was ended resumes at the prompts that are missing; the order of the output says
nothing, and an answer depends on its prompt and the settings alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import msgspec

from paceline.errors import DataError
from paceline.types import JsonDict, Sampling

ASKING_ROLES = ("system", "developer", "user")
"""Roles that are kept from a prompt; `assistant` turns are made anew, but for those that call tools."""
_STALE_KEYS = ("messages", "truncated")
"""Keys of a row that said something of the answers that were replaced."""
_KEPT_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""What a kept turn of a tool, or one that calls it, has beside role and content."""


class ChatTokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def apply_chat_template(self, conversation: list[JsonDict], **settings: Any) -> Any:
        """The conversation as one string (`tokenize=False`)."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], **settings: Any) -> Any:
        """Text of token ids."""
        ...


@dataclass(frozen=True, slots=True)
class RegenerateSettings:
    """How prompts are answered.

    Attributes:
        sampling: limits and randomness of every answer.
        cut: what becomes of a conversation with an answer that reached its limit: `drop` (written to the file of cut
            rows) or `mark` (kept among the others with finish_reason `length`). Its later turns are not asked;
            one without any answer is always dropped.
        max_context_tokens: a turn whose prompt and longest answer exceed this is not asked and counts as cut; None =
            no limit.
        model: by which name rows say who answered: the model at a server, the target's folder in this process.
        template: variables of the chat template for every prompt, such as `{"enable_thinking": False}`; a row's own
            `chat_template_kwargs` and `enable_thinking` win.
    """

    sampling: Sampling
    cut: Literal["drop", "mark"] = "drop"
    max_context_tokens: int | None = None
    model: str = ""
    template: Mapping[str, Any] = field(default_factory=dict)

    def answered_by(self) -> JsonDict:
        """What is the same in every row of one output."""
        return {
            "sampling": asdict(self.sampling),
            "max_context_tokens": self.max_context_tokens,
            "model": self.model,
            "template": dict(self.template),
        }


@dataclass(slots=True)
class RegenerateReport:
    """What one call did.

    Attributes:
        written: rows added to the output.
        cut: rows whose answer was cut, wherever they went.
        already_there: rows skipped because an earlier run had answered them.
        repeated: rows skipped because the same prompt came earlier in the same input.
        answer_tokens: tokens generated, those of cut answers included.
        retries: requests that were tried again.
        refused: rows that the chat template or the server refuses, with what it said.
    """

    written: int = 0
    cut: int = 0
    already_there: int = 0
    repeated: int = 0
    answer_tokens: int = 0
    retries: int = 0
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ServerReply:
    """One answer.

    Attributes:
        turn: of the assistant, with `reasoning_content` and `token_ids` where they are known.
        num_tokens: of the answer.
        finish_reason: whether it ended by itself (`stop`) or was cut (`length`).
    """

    turn: JsonDict
    num_tokens: int
    finish_reason: Literal["stop", "length"]


class Answers(Protocol):
    """Who answers: several conversations at once, each for one turn at a time."""

    num_open: int
    """Conversations to keep under way."""

    @property
    def retries(self) -> int:
        """Requests that were tried again."""
        ...

    def submit(self, conversation: OpenConversation) -> None:
        """Ask for the next answer of a conversation."""
        ...

    def collect(self) -> list[tuple[OpenConversation, ServerReply | str]]:
        """Wait for answers: each with its conversation; text says why one is refused.

        Raises:
            DataError: nobody answers; raised when all answers that came are collected.
        """
        ...

    def close(self) -> list[tuple[OpenConversation, ServerReply | str]]:
        """End what is under way, and hand out the answers that came meanwhile."""
        ...


@dataclass(slots=True, eq=False)
class OpenConversation:
    """A prompt under way: turns still to ask, and the conversation so far."""

    row_id: str
    extras: JsonDict
    left: list[JsonDict]
    said: list[JsonDict] = field(default_factory=list)
    answer_tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "stop"
    answered: int = 0

    def advance(self) -> bool:
        """Move turns over up to the next question; False when nothing is left to ask or an answer was cut."""
        if self.finish_reason == "length":
            return False
        while self.left:
            self.said.append(self.left.pop(0))
            if is_question(self.said[-1], self.left[0] if self.left else None):
                return True
        return False

    def answer(self, reply: ServerReply) -> None:
        """Add an answer to what was said."""
        self.said.append(reply.turn)
        self.answered = len(self.said)
        self.answer_tokens.append(reply.num_tokens)
        self.finish_reason = reply.finish_reason

    def too_long(self) -> None:
        """End before a question that does not fit; what was answered before it stays."""
        self.finish_reason = "length"
        if self.answer_tokens:
            del self.said[self.answered :]

    def template_variables(self, settings: RegenerateSettings) -> JsonDict:
        """Variables of the chat template: those of the settings, and the row's own."""
        return {**settings.template, **own_variables(self.extras)}


def is_question(turn: Mapping[str, Any], after: Mapping[str, Any] | None) -> bool:
    """Whether the assistant answers a turn in text, given the kept turn after it.

    It answers users and tools, but for a turn that a kept call or a further tool's result follows.
    """
    return turn["role"] in ("user", "tool") and (after is None or after["role"] not in ("assistant", "tool"))


def kept_turns(messages: Iterable[Mapping[str, Any]]) -> list[JsonDict]:
    """The turns that stay: all but the assistant's answers in text."""
    return [dict(message) for message in messages if message["role"] != "assistant" or message.get("tool_calls")]


def unanswerable(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Why turns cannot be answered anew, or None."""
    for turn, message in enumerate(messages):
        before = messages[turn - 1] if turn else {"role": "nobody"}
        if message["role"] == "tool" and before["role"] != "tool" and not before.get("tool_calls"):
            return f"message {turn}: role 'tool' without a call before it"
    kept = kept_turns(messages)
    if not any(is_question(turn, after) for turn, after in zip(kept, [*kept[1:], None], strict=True)):
        return "no user message; there is nothing to answer in text"
    return None


def prompt_id(
    messages: Sequence[Mapping[str, Any]], tools: Any = None, variables: Mapping[str, Any] | None = None
) -> str:
    """A stable id of a prompt: 16 hex digits of a hash over roles and contents of the turns that stay, tools, and the
    row's own variables of the chat template."""
    asking: list[Any] = []
    for turn in kept_turns(messages):
        calls = [turn["tool_calls"]] if turn.get("tool_calls") else []
        asking.append([turn["role"], turn["content"], *calls])
    asking += [[name, value] for name, value in (("tools", tools), ("variables", variables)) if value]
    return hashlib.sha256(msgspec.json.encode(asking, order="sorted" if variables else None)).hexdigest()[:16]


def cut_path(output: Path) -> Path:
    """Where the rows with cut answers go: `chats.jsonl` → `chats.cut.jsonl`."""
    return output.with_name(f"{output.stem}.cut{output.suffix}")


def own_variables(row: Mapping[str, Any]) -> JsonDict:
    """The variables of the chat template that a row sets itself."""
    own = row.get("chat_template_kwargs")
    switch = {"enable_thinking": row["enable_thinking"]} if isinstance(row.get("enable_thinking"), bool) else {}
    return {**(own if isinstance(own, Mapping) else {}), **switch}


def prompt_tokens(conversation: OpenConversation, tokenizer: ChatTokenizer, settings: RegenerateSettings) -> list[int]:
    """The conversation so far as token ids, up to where the assistant speaks.

    Raises:
        DataError: the chat template refuses it.
    """
    from jinja2.exceptions import TemplateError

    variables = conversation.template_variables(settings)
    if conversation.extras.get("tools"):
        variables["tools"] = conversation.extras["tools"]
    said = [{key: value for key, value in turn.items() if key != "token_ids"} for turn in conversation.said]
    try:
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, **variables)
    except (TemplateError, TypeError, LookupError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise DataError(f"prompt {conversation.row_id}: the chat template refuses it ({lines[0]})") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def regenerate(
    prompts: Iterable[Mapping[str, Any]],
    answers: Answers,
    settings: RegenerateSettings,
    output: Path,
    *,
    tokenizer: ChatTokenizer | None = None,
    progress: Callable[[], None] | None = None,
) -> RegenerateReport:
    """Answer every prompt that the output does not hold yet, and add the conversations to it.

    Args:
        prompts: rows with `messages` (role and content each, tool calls and results where there are), `tools` and
            `chat_template_kwargs`; other keys are kept.
        answers: who answers; closed at the end.
        settings: see there.
        output: JSON lines file, made or continued. A last line that was cut by a kill is removed first.
        tokenizer: of the target, with a chat template; needed where `settings.max_context_tokens` is set.
        progress: called for every prompt that is done or skipped.

    Each row written: `prompt_hash`, `id` (the row's own, else the hash), `messages`, `finish_reason`,
    `answer_tokens` (a count an answer), `sampling`, `model`, `template`, and the prompt's other keys.

    Raises:
        DataError: for a row that is not a prompt, an output made with other settings or by another target, or a server
            that cannot be used; what was answered is kept.
    """
    report = RegenerateReport()
    try:
        if settings.max_context_tokens is not None and tokenizer is None:
            raise DataError("max_context_tokens needs a tokenizer: a server does not say how long a prompt is")
        output.parent.mkdir(parents=True, exist_ok=True)
        done = _rows_there(output, settings) | _rows_there(cut_path(output), settings)
        with output.open("ab") as kept, cut_path(output).open("ab") as cut:
            run = _Run(answers, settings, tokenizer, report, progress or (lambda: None), kept, cut)
            try:
                run.answer_all(_open_conversations(prompts, done, report, run.progress))
            finally:
                for conversation, reply in answers.close():
                    run.take(conversation, reply)
    finally:
        answers.close()
    report.retries = answers.retries
    if not cut_path(output).stat().st_size:
        cut_path(output).unlink()
    return report


@dataclass(slots=True)
class _Run:
    """One call of `regenerate`: who answers, and the files that grow."""

    answers: Answers
    settings: RegenerateSettings
    tokenizer: ChatTokenizer | None
    report: RegenerateReport
    progress: Callable[[], None]
    kept: IO[bytes]
    cut: IO[bytes]

    def answer_all(self, conversations: Iterator[OpenConversation]) -> None:
        """Keep as many conversations under way as the one who answers wants."""
        num_open, more = 0, True
        while more or num_open:
            while more and num_open < self.answers.num_open:
                conversation = next(conversations, None)
                more = conversation is not None
                num_open += conversation is not None and self._ask(conversation)
            if num_open:
                for conversation, reply in self.answers.collect():
                    num_open -= not (self.take(conversation, reply) and self._ask(conversation))

    def take(self, conversation: OpenConversation, reply: ServerReply | str) -> bool:
        """Add an answer to its conversation; whether the conversation has more turns."""
        if isinstance(reply, str):
            self.report.refused.append(reply)
            self.progress()
            return False
        conversation.answer(reply)
        if reply.finish_reason == "stop" and conversation.left:
            return True
        self._write(conversation)
        return False

    def _ask(self, conversation: OpenConversation) -> bool:
        """Ask the next question of a conversation; False where it has none, or none that fits, and is done."""
        if not conversation.advance():
            self._write(conversation)
            return False
        try:
            fitting = self._fits(conversation)
        except DataError as error:
            self.take(conversation, str(error))
            return False
        if not fitting:
            conversation.too_long()
            self._write(conversation)
            return False
        self.answers.submit(conversation)
        return True

    def _fits(self, conversation: OpenConversation) -> bool:
        """Whether the prompt and the longest answer are within the context."""
        limit = self.settings.max_context_tokens
        if limit is None or self.tokenizer is None:
            return True
        num_tokens = len(prompt_tokens(conversation, self.tokenizer, self.settings))
        return num_tokens + self.settings.sampling.max_new_tokens <= limit

    def _write(self, conversation: OpenConversation) -> None:
        """One row, flushed, so that a kill loses no more than what is under way."""
        was_cut = conversation.finish_reason == "length"
        dropped = was_cut and (self.settings.cut == "drop" or not conversation.answer_tokens)
        row = {
            "id": conversation.row_id,
            **conversation.extras,
            "prompt_hash": conversation.row_id,
            "messages": conversation.said,
            "finish_reason": conversation.finish_reason,
            "answer_tokens": conversation.answer_tokens,
            **self.settings.answered_by(),
        }
        file = self.cut if dropped else self.kept
        file.write(msgspec.json.encode(row) + b"\n")
        file.flush()
        self.report.cut += was_cut
        self.report.written += not dropped
        self.report.answer_tokens += sum(conversation.answer_tokens)
        self.progress()


def _rows_there(path: Path, settings: RegenerateSettings) -> set[str]:
    """Hashes of the prompts that a file holds; a torn last line is removed from it.

    Raises:
        DataError: a row of something else, or one answered by another target or with other settings.
    """
    if not path.exists():
        return set()
    wanted = settings.answered_by()
    found: set[str] = set()
    whole = 0
    with path.open("r+b") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                row = msgspec.json.decode(line)
                found.add(row["prompt_hash"])
                theirs = {name: row[name] for name in wanted}
            except (msgspec.DecodeError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}:{number}: not a row of an earlier run ({error}); choose another output"
                ) from error
            if differing := [
                f"{key} {theirs[key]} there, {wanted[key]} asked" for key in wanted if theirs[key] != wanted[key]
            ]:
                raise DataError(
                    f"{path}:{number}: answered otherwise ({'; '.join(differing)}); "
                    "choose another output or the same settings"
                )
        file.truncate(whole)
    return found


def _open_conversations(
    prompts: Iterable[Mapping[str, Any]], done: set[str], report: RegenerateReport, skipped: Callable[[], None]
) -> Iterator[OpenConversation]:
    """The prompts still to answer, checked; skipped ones are counted."""
    seen: set[str] = set()
    for number, row in enumerate(prompts, start=1):
        messages = _checked(number, row)
        row_id = prompt_id(messages, row.get("tools"), own_variables(row))
        if row_id in seen or row_id in done:
            report.repeated += row_id in seen
            report.already_there += row_id not in seen
            seen.add(row_id)
            skipped()
            continue
        seen.add(row_id)
        extras = {key: value for key, value in row.items() if key not in _STALE_KEYS}
        yield OpenConversation(row_id, extras, kept_turns(messages))


def _checked(number: int, row: Mapping[str, Any]) -> list[JsonDict]:
    """The messages of a row in plain form."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"prompt {number}: no `messages`; a prompt is a row with a list of role and content")
    plain: list[JsonDict] = []
    for turn, message in enumerate(messages):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        roles = (*ASKING_ROLES, "assistant", "tool")
        if not isinstance(role, str) or role not in roles or not isinstance(content, str):
            raise DataError(
                f"prompt {number}, message {turn}: role {role!r}; regeneration takes text of the roles "
                f"{', '.join(roles)}: leave such rows out"
            )
        kept = role == "tool" or message.get("tool_calls")
        more = {key: message[key] for key in _KEPT_KEYS if kept and message.get(key) is not None}
        plain.append({"role": role, "content": content, **more})
    if error := unanswerable(plain):
        raise DataError(f"prompt {number}{', ' if error.startswith('message') else ': '}{error}")
    return plain
