"""Judges samples of conversations with any chat template, knowing nothing of how they were made.

Every message carries words of its own. What the assistant said with loss must be supervised exactly once over all
samples, nothing else ever; the tokens before each answer must be those of `apply_chat_template` with a generation
prompt, in one mode for the whole conversation; each supervised span ends with a token at which servers stop.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EMPTY_THOUGHT = re.compile(
    r"\s*(?:<(think|thinking|thought)>\s*</\1>|</(?:think|thinking|thought)>|\[THINK\]\s*\[/THINK\]|\[/THINK\]"
    r"|<\|channel>thought\s*<channel\|>|<\|START_THINKING\|>\s*<\|END_THINKING\|>|<\|inner_prefix\|><\|inner_suffix\|>)\s*"
)
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")


@dataclass(frozen=True)
class Turn:
    """A message: role, text; of the assistant also its thought, its calls (name and arguments), and its loss."""

    role: str
    text: str = ""
    thought: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    loss: bool = True

    def words(self) -> list[str]:
        """The marker words of the turn."""
        calls = " ".join(f"{name} {json.dumps(arguments)}" for name, arguments in self.calls)
        return re.findall(r"\w*mark\w*", f"{self.thought} {self.text} {calls}")


@dataclass(frozen=True)
class Chat:
    """A conversation: its turns, tools, and the row that a data file holds of it."""

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict)
    ids: bool = True  # whether calls and results have ids

    @property
    def thinks(self) -> bool:
        return any(turn.thought for turn in self.turns)


@dataclass(frozen=True)
class Prepared:
    """What was made of a row: token ids and supervised (start, end) ranges of each sample, or why it was set aside."""

    samples: Sequence[tuple[Sequence[int], Sequence[tuple[int, int]]]] = ()
    no_end: bool = False  # whether it is said that turns close with nothing at which servers stop
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Verdict:
    """`right`, `set aside` or `wrong`, and why."""

    kind: str
    why: str = ""


def messages_of(turns: Sequence[Turn], key: str | None, arguments_as_text: bool = False) -> list[dict[str, Any]]:
    """Messages as a server hands them to the template; thoughts under a key, or (None) inside the content."""
    made: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.thought and key:
            message[key] = turn.thought
        elif turn.thought:
            message["content"] = f"<think>\n{turn.thought}\n</think>\n\n{turn.text}"
        if turn.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": f"call{number:04d}{place}",  # nine letters and digits, as Mistral asks
                    "function": {"name": name, "arguments": json.dumps(given) if arguments_as_text else given},
                }
                for place, (name, given) in enumerate(turn.calls)
            ]
        if turn.role == "tool":
            asked = next(k for k in range(number - 1, -1, -1) if turns[k].calls)
            message["tool_call_id"] = f"call{asked:04d}{number - asked - 1}"
        made.append(message)
    return made


def parts_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its content as a list of parts, its thought as one of them."""
    thought = message.get("thinking")
    parts = [{"type": "thinking", "thinking": thought}] if thought else []
    kept = {key: value for key, value in message.items() if key != "thinking"}
    return {**kept, "content": [*parts, {"type": "text", "text": message["content"]}]}


def without_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, where calls and results have no ids."""
    made = [{key: value for key, value in message.items() if key != "tool_call_id"} for message in messages]
    for message in made:
        if "tool_calls" in message:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "id"} for call in message["tool_calls"]]
    return made


def served_prompts(tokenizer: Any, chat: Chat, place: int, mode: Mapping[str, Any]) -> Iterator[list[int]]:
    """Token ids that a server may feed before the turn at `place`, in one mode: whatever form thoughts come in."""
    seen: list[list[int]] = []
    forms = itertools.product((*REASONING_KEYS, None), (False, True), ("none", "thoughts", "all"))
    for key, as_text, in_parts in forms:
        messages = messages_of(chat.turns[:place], key, as_text)
        messages = messages if chat.ids else without_ids(messages)
        if in_parts != "none":
            messages = [parts_of(told) if in_parts == "all" or "thinking" in told else told for told in messages]
        try:
            ids = tokenizer.apply_chat_template(
                messages,
                tools=list(chat.tools) or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **mode,
            )
        except Exception:
            continue
        if ids not in seen:
            seen.append(ids)
            yield ids


def judge(
    tokenizer: Any,
    chat: Chat,
    prepared: Prepared,
    *,
    ends: Sequence[int],
    modes: Sequence[Mapping[str, Any]],
) -> Verdict:
    """Whether what was prepared of a chat is what a server would see.

    Args:
        tokenizer: of the target.
        chat: with marker words in every turn.
        prepared: of the chat's row.
        ends: ids at which a server stops.
        modes: variables of the template that are allowed for this chat.
    """
    if prepared.reason:
        return Verdict("set aside", f"{prepared.reason}: {prepared.detail}")
    decode = lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)  # noqa: E731
    asked = next(place for place, turn in enumerate(chat.turns) if turn.role == "user")
    learned = [k for k, turn in enumerate(chat.turns) if turn.role == "assistant" and k > asked and turn.loss]
    spans = [
        (list(ids[:start]), list(ids[start:end]), place)
        for ids, ranges in prepared.samples
        for start, end in ranges
        for place in [_turn_of(chat, learned, decode(ids[start:end]))]
    ]
    texts = [decode(answer) for _, answer, _ in spans]
    for place, turn in enumerate(chat.turns):
        for word in turn.words():
            count, wanted = sum(len(re.findall(rf"\b{word}\b", text)) for text in texts), int(place in learned)
            if count != wanted:
                return Verdict("wrong", f"turn {place}: {word} is supervised {count} times")
    if sorted(place for _, _, place in spans) != learned:
        return Verdict("wrong", f"spans of turns {[place for _, _, place in spans]} for {learned}")
    for _, answer, place in spans:
        if answer[-1] not in ends and not prepared.no_end:
            return Verdict("wrong", f"turn {place} ends with {decode(answer[-1:])!r}")
        if any(token in ends for token in answer[:-1]):
            return Verdict("wrong", f"turn {place} goes on behind an end token")
        if chat.turns[place].thought and EMPTY_THOUGHT.match(decode(answer)):
            return Verdict("wrong", f"turn {place} has a thought, an empty one is supervised")
    reasons = []
    for mode in modes:
        found = [_mismatch(tokenizer, chat, span, mode) for span in spans]
        if not any(found):
            return Verdict("right", str(dict(mode)))
        reasons += [f"{dict(mode)}: {reason}" for reason in found if reason]
    return Verdict("wrong", reasons[0])


def _turn_of(chat: Chat, learned: Sequence[int], text: str) -> int:
    """The turn whose words a span holds; -1 where there is none."""
    return next((k for k in learned if any(word in text for word in chat.turns[k].words())), -1)


def _mismatch(tokenizer: Any, chat: Chat, span: tuple[list[int], list[int], int], mode: Mapping[str, Any]) -> str:
    """Why the tokens before a span are not those of a server in a mode; "" where they are.

    Only where nobody thought, an empty thought that the template wrote may stand unsupervised before the answer.
    """
    before, _, place = span
    for prompt in served_prompts(tokenizer, chat, place, mode):
        if before == prompt:
            return ""
        if before[: len(prompt)] == prompt and not chat.turns[place].thought:
            lead = tokenizer.decode(before[len(prompt) :], skip_special_tokens=False)
            if EMPTY_THOUGHT.fullmatch(lead):
                return ""
    return f"turn {place} follows {tokenizer.decode(before[-24:], skip_special_tokens=False)!r}"
