"""Answers to prompts by the target itself: a drafter should learn the text that its target writes.

Rows in `messages` form go in; for each user turn the conversation so far is rendered with the tokenizer's chat
template up to the assistant's turn, an injected `generate` answers whole batches, and the decoded answer is appended
before the next turn is asked. Assistant turns that came with a row are replaced; those that call tools, and what the
tools said, stay as they are. Rows are written as JSON lines,
each flushed, so a run that was ended continues where it stopped; torch stays on the other side of the `generate`
door.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import msgspec

from paceline.errors import DataError
from paceline.types import GenerateAnswers, GeneratedAnswer, JsonDict, Sampling

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
        batch_size: conversations answered side by side.
        cut: what becomes of a conversation with an answer that reached its limit: `drop` (written to the file of cut
            rows) or `mark` (kept among the others with finish_reason `length`). Its later turns are not asked;
            one without any answer is always dropped.
        max_context_tokens: a turn whose prompt and longest answer exceed this is not asked and counts as cut; None =
            no limit.
        model: by which name rows say who answered: the model at a server, the target's folder in this process.
        template: further variables of the chat template, such as `{"enable_thinking": False}`; a row's own
            `chat_template_kwargs` and `enable_thinking` win.
        send_reasoning: whether a server gets the reasoning of earlier answers back, as `reasoning_content`: where the
            target's chat template reads that.
    """

    sampling: Sampling
    batch_size: int = 16
    cut: Literal["drop", "mark"] = "drop"
    max_context_tokens: int | None = None
    model: str = ""
    template: Mapping[str, Any] = field(default_factory=dict)
    send_reasoning: bool = False

    def answered_by(self) -> JsonDict:
        """What every row of one output has in common, as it stands in each."""
        return {
            "sampling": asdict(self.sampling),
            "max_context_tokens": self.max_context_tokens,
            "model": self.model,
            "template": dict(self.template),
        }


@dataclass(frozen=True, slots=True)
class RegenerateReport:
    """What one call did.

    Attributes:
        written: rows added to the output.
        cut: rows whose answer was cut, wherever they went.
        already_there: rows skipped because an earlier run had answered them.
        repeated: rows skipped because the same prompt came earlier in the same input.
        answer_tokens: tokens generated, those of cut answers included.
        refused: rows that the chat template refuses, with what it said; only of answers in this process.
    """

    written: int
    cut: int
    already_there: int
    repeated: int
    answer_tokens: int
    refused: tuple[str, ...] = ()


@dataclass(slots=True)
class OpenConversation:
    """A prompt on its way: turns still to ask, and the conversation so far."""

    row_id: str
    extras: JsonDict
    left: list[JsonDict]
    said: list[JsonDict] = field(default_factory=list)
    answer_tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "stop"
    answered: int = 0
    refused: str | None = None

    def advance(self) -> bool:
        """Move turns over up to the next question; False when nothing is left to ask or an answer was cut."""
        if self.finish_reason == "length" or self.refused:
            return False
        while self.left:
            self.said.append(self.left.pop(0))
            if is_question(self.said[-1], self.left[0] if self.left else None):
                return True
        return False

    def answer(self, turn: JsonDict, num_tokens: int, finish_reason: Literal["stop", "length"]) -> None:
        """Add an answer to what was said."""
        self.said.append(turn)
        self.answered = len(self.said)
        self.answer_tokens.append(num_tokens)
        self.finish_reason = finish_reason

    def too_long(self) -> None:
        """End before a question that does not fit; what was answered before it stays."""
        self.finish_reason = "length"
        if self.answer_tokens:
            del self.said[self.answered :]


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


def regenerate(
    prompts: Iterable[Mapping[str, Any]],
    generate: GenerateAnswers,
    tokenizer: ChatTokenizer,
    settings: RegenerateSettings,
    output: Path,
) -> RegenerateReport:
    """Answer every prompt that the output does not hold yet, and add the conversations to it.

    Args:
        prompts: rows with `messages` (role and content each, tool calls and results where there are), `tools` and
            `chat_template_kwargs`; other keys are kept.
        generate: answers tokenized prompts (the door `GenerateAnswers`).
        tokenizer: with a chat template.
        settings: see there.
        output: JSON lines file, made or continued. A last line that was cut by a kill is removed first.

    Each row written: `prompt_hash`, `id` (the row's own, else the hash), `messages`, `finish_reason`,
    `answer_tokens` (a count an answer), `sampling`, `model`, `template`, and the prompt's other keys. An answer depends
    on its prompt and these settings only, not on order or batch.

    Raises:
        DataError: for a row that is no prompt, or an output made with other settings or by another target.
    """
    if settings.batch_size < 1:
        raise DataError(f"regenerate: batch_size is {settings.batch_size}; it must be at least 1")
    output.parent.mkdir(parents=True, exist_ok=True)
    done = rows_there(output, settings) | rows_there(cut_path(output), settings)
    counts = {"written": 0, "cut": 0, "already_there": 0, "repeated": 0, "answer_tokens": 0}
    refused: list[str] = []
    with output.open("ab") as kept, cut_path(output).open("ab") as cut:
        for batch in _batches(open_conversations(prompts, done, counts), settings.batch_size):
            _answer(batch, generate, tokenizer, settings)
            for conversation in batch:
                if conversation.refused:
                    refused.append(conversation.refused)
                    continue
                was_cut = conversation.finish_reason == "length"
                dropped = was_cut and (settings.cut == "drop" or not conversation.answer_tokens)
                write_row(cut if dropped else kept, conversation, settings)
                counts["cut"] += was_cut
                counts["written"] += not dropped
                counts["answer_tokens"] += sum(conversation.answer_tokens)
    if not cut_path(output).stat().st_size:
        cut_path(output).unlink()
    return RegenerateReport(**counts, refused=tuple(refused))


def rows_there(path: Path, settings: RegenerateSettings) -> set[str]:
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


def open_conversations(
    prompts: Iterable[Mapping[str, Any]], done: set[str], counts: dict[str, int]
) -> Iterator[OpenConversation]:
    """The prompts still to answer, checked; skipped ones are counted."""
    seen: set[str] = set()
    for number, row in enumerate(prompts, start=1):
        messages = _checked(number, row)
        row_id = prompt_id(messages, row.get("tools"), own_variables(row))
        if row_id in seen:
            counts["repeated"] += 1
            continue
        seen.add(row_id)
        if row_id in done:
            counts["already_there"] += 1
            continue
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


def _batches(conversations: Iterator[OpenConversation], size: int) -> Iterator[list[OpenConversation]]:
    """Lists of up to `size` conversations."""
    batch: list[OpenConversation] = []
    for conversation in conversations:
        batch.append(conversation)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _answer(
    batch: list[OpenConversation], generate: GenerateAnswers, tokenizer: ChatTokenizer, settings: RegenerateSettings
) -> None:
    """Ask all turns of a batch of conversations, one turn of each at a time."""
    asking = [conversation for conversation in batch if conversation.advance()]
    while asking:
        asked: list[tuple[OpenConversation, list[int]]] = []
        for conversation in asking:
            try:
                prompt = prompt_tokens(conversation, tokenizer, settings)
            except DataError as error:
                conversation.refused = str(error)
                continue
            if not fits(len(prompt), settings):
                conversation.too_long()
            else:
                asked.append((conversation, prompt))
        answers = generate([prompt for _, prompt in asked], settings.sampling) if asked else []
        for (conversation, _), answer in zip(asked, answers, strict=True):
            _append(conversation, answer, tokenizer)
        asking = [conversation for conversation, _ in asked if conversation.advance()]


def fits(prompt_tokens: int, settings: RegenerateSettings) -> bool:
    """Whether a prompt of this many tokens and the longest answer are within the context."""
    limit = settings.max_context_tokens
    return limit is None or prompt_tokens + settings.sampling.max_new_tokens <= limit


def own_variables(row: Mapping[str, Any]) -> JsonDict:
    """The variables of the chat template that a row sets itself."""
    own = row.get("chat_template_kwargs")
    switch = {"enable_thinking": row["enable_thinking"]} if isinstance(row.get("enable_thinking"), bool) else {}
    return {**(own if isinstance(own, Mapping) else {}), **switch}


def template_variables(conversation: OpenConversation, settings: RegenerateSettings) -> JsonDict:
    """Variables of the chat template: those of the settings, and the row's own."""
    return {**settings.template, **own_variables(conversation.extras)}


def prompt_tokens(conversation: OpenConversation, tokenizer: ChatTokenizer, settings: RegenerateSettings) -> list[int]:
    """The conversation so far as token ids, up to where the assistant speaks.

    Raises:
        DataError: the chat template refuses it.
    """
    from jinja2.exceptions import TemplateError

    variables = template_variables(conversation, settings)
    if conversation.extras.get("tools"):
        variables["tools"] = conversation.extras["tools"]
    try:
        text = tokenizer.apply_chat_template(conversation.said, tokenize=False, add_generation_prompt=True, **variables)
    except (TemplateError, TypeError, LookupError) as error:
        said = str(error).splitlines() or [type(error).__name__]
        raise DataError(f"prompt {conversation.row_id}: the chat template refuses it ({said[0]})") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def _append(conversation: OpenConversation, answer: GeneratedAnswer, tokenizer: ChatTokenizer) -> None:
    """Add a decoded answer, special tokens kept: they are part of what the target wrote."""
    text = tokenizer.decode(list(answer.ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    conversation.answer({"role": "assistant", "content": text}, len(answer.ids), answer.finish_reason)


def write_row(file: IO[bytes], conversation: OpenConversation, settings: RegenerateSettings) -> None:
    """One row, flushed, so that a kill loses no more than the batch under way."""
    row = {
        "id": conversation.row_id,
        **conversation.extras,
        "prompt_hash": conversation.row_id,
        "messages": conversation.said,
        "finish_reason": conversation.finish_reason,
        "answer_tokens": conversation.answer_tokens,
        **settings.answered_by(),
    }
    file.write(msgspec.json.encode(row) + b"\n")
    file.flush()
