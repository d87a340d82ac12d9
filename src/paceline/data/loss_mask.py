"""Which tokens of a conversation the target would have generated: loss masks that cannot disagree with serving.

For each assistant turn the conversation before it is rendered with the generation prompt, as a server does. The turn
is supervised from the first token after that prompt to the end token at which a server stops, both included, and
nothing else is. The prompt's tokens are those of the prompt read alone, as a server reads it, even where a token of
the whole text would reach across the border.

Several turns share one sample where each one's prompt and answer are, token for token, a prefix of the sample.
Where the template rewrites earlier turns (thinking taken out of the history), they get a sample of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paceline.data.chat_template import Encoder, Renderer
from paceline.data.rows import Conversation, PlainText, ReadyTokens, RowRejected
from paceline.errors import DataError

_EMPTY_THOUGHT = re.compile(r"\s*(?:[^\w\s]+(\w+)[^\w\s]+\s*[^\w\s]+\1[^\w\s]+|[^\w\s]*/(\w+)[^\w\s]+)\s*")
"""An empty pair of think tags, or the closing one of a pair that the generation prompt opened."""
_OPEN_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning)>\s*$")


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids with the spans that are supervised.

    Attributes:
        ids: int32 [length].
        spans: supervised token ranges, int32 [2 · spans]: start and end (exclusive), ascending, apart.
        notes: what should be said about it, keys of `report.NOTES`.
        tags: words by which reports are split.
    """

    ids: np.ndarray
    spans: np.ndarray
    notes: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    def mask(self) -> np.ndarray:
        """Loss mask, bool [length]."""
        return mask_of(self.spans, len(self.ids))


@dataclass(slots=True)
class _Turn:
    """One assistant turn as it is served: prompt, what the target writes, and how much of that is template."""

    place: int
    prompt: str
    answer: str
    lead: int = 0
    notes: tuple[str, ...] = ()
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    start: int = 0
    merged: bool = False


def mask_of(spans: np.ndarray, length: int) -> np.ndarray:
    """Loss mask, bool [length], of flat (start, end) spans."""
    mask = np.zeros(length, dtype=bool)
    for start, end in spans.reshape(-1, 2):
        mask[start:end] = True
    return mask


def spans_of(mask: np.ndarray) -> np.ndarray:
    """Flat (start, end) spans, int32, of a loss mask."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], np.asarray(mask, dtype=bool), [False]))))
    return edges.astype(np.int32)


def samples_of(
    conversation: Conversation, renderer: Renderer, encoder: Encoder, *, on_rewrite: str = "split"
) -> list[Sample]:
    """The training samples of a conversation.

    Args:
        conversation: with at least one assistant turn after a user turn.
        renderer, encoder: of the target.
        on_rewrite: where the template rewrites earlier turns, `split` gives each turn that cannot share a sample one
            of its own, `last` supervises only what fits the last turn's sample.

    Returns:
        One sample, or several in the order of the turns.

    Raises:
        SetAside: the template refuses it, an answer does not continue the generation prompt or holds an end token.
    """
    memory: dict[str, list[int]] = {}
    turns = _served_turns(conversation, renderer, encoder)
    for turn in turns:
        _tokenize(turn, encoder, memory)
    samples: list[Sample] = []
    left = turns
    while left:
        last = left[-1]
        inside = [turn for turn in left if turn is last or _is_prefix(turn, last)]
        taken = {turn.place for turn in inside}
        left = [turn for turn in left if turn.place not in taken]
        samples.append(_sample(last, inside, conversation))
        if on_rewrite == "last":
            break
    samples.reverse()
    if len(samples) > 1 or left:
        note = "history_rewritten" if on_rewrite == "split" else "only_last_supervised"
        samples = [_noted(sample, note) for sample in samples]
    return samples


def plain_sample(row: PlainText, encoder: Encoder) -> Sample:
    """Plain text: every token is supervised but those that the tokenizer puts in front."""
    ids = encoder.tokenizer.encode(row.text)
    first = 0
    while first < len(ids) and ids[first] in encoder.special_ids:
        first += 1
    spans = [first, len(ids)] if first < len(ids) else []
    return Sample(np.asarray(ids, dtype=np.int32), np.asarray(spans, dtype=np.int32), ("plain_text",), row.tags)


def ready_sample(row: ReadyTokens, vocabulary: int) -> Sample:
    """Ready tokens as they are; ids outside the vocabulary and masks that are all true are set aside."""
    if not row.ids:
        raise RowRejected("bad_tokens", "no tokens")
    if max(row.ids) >= vocabulary:
        raise RowRejected("bad_tokens", f"token id {max(row.ids)} is outside the vocabulary of {vocabulary}")
    mask = np.asarray(row.loss_mask, dtype=bool)
    if mask.all():
        raise RowRejected("all_supervised", f"all {len(mask)} tokens are supervised, the prompt too")
    return Sample(np.asarray(row.ids, dtype=np.int32), spans_of(mask), tags=row.tags)


def check_generation_tags(conversation: Conversation, renderer: Renderer, encoder: Encoder, where: str) -> None:
    """Compare the supervised text with what the template's own generation tags enclose.

    Both must agree on every answer of the conversation that the history keeps, up to the end token and whitespace,
    which some templates leave outside their tags, and the turn's header, which some have inside.

    Raises:
        DataError: they disagree; names the row, and shows both.
    """
    turns = _served_turns(conversation, renderer, encoder)
    for variables in renderer.variables(conversation):
        text, tagged = renderer.tagged(conversation, turns[-1].place + 1, variables)
        kept = [turn for turn in turns if text.startswith(turn.prompt + turn.answer)]
        if kept:
            break
    else:
        return
    before = renderer.texts(conversation, [turn.place for turn in kept], variables, generation=False)
    for turn, history in zip(kept, before, strict=True):
        start, end = len(turn.prompt) + turn.lead, len(turn.prompt) + len(turn.answer)
        # Tags may open at the turn's header, which the generation prompt holds, and no earlier.
        header = len(history) if turn.prompt.startswith(history) else start
        inside = [text[a if a < header else max(a, start) : b] for a, b in tagged if a < end and b > start]
        ours = _bare(text[start:end], encoder)
        theirs = _bare("".join(inside), encoder)
        if ours != theirs:
            raise DataError(
                f"{where}: turn {turn.place}: the chat template's generation tags mark {theirs[:80]!r}, but a server "
                f"would have the target write {ours[:80]!r}; the template contradicts itself, repair its tags"
            )


def _bare(text: str, encoder: Encoder) -> str:
    return (encoder.special_pattern.sub("", text) if encoder.special_pattern else text).strip()


def _served_turns(conversation: Conversation, renderer: Renderer, encoder: Encoder) -> list[_Turn]:
    messages = conversation.messages
    asked = next(place for place, turn in enumerate(messages) if turn["role"] == "user")
    places = [place for place, turn in enumerate(messages) if turn["role"] == "assistant" and place > asked]
    if not places:
        raise RowRejected("no_assistant", "the only answer stands before the first question")
    choices = [
        (
            renderer.texts(conversation, places, variables, generation=True),
            renderer.texts(conversation, [place + 1 for place in places], variables, generation=False),
        )
        for variables in renderer.variables(conversation)
    ]
    turns: list[_Turn] = []
    for number, place in enumerate(places):
        _refuse_end_tokens(messages[place], place, encoder)
        pairs = [(prompts[number], wholes[number]) for prompts, wholes in choices]
        if messages[place].get("tool_calls"):
            _refuse_unwritten_calls(conversation, place, pairs[0][1], renderer)
        turns.append(_served_turn(conversation, place, pairs, renderer, encoder))
    return turns


def _refuse_unwritten_calls(conversation: Conversation, place: int, whole: str, renderer: Renderer) -> None:
    """Set the row aside where the template writes a turn as if it had no tool calls."""
    *before, turn = conversation.messages[: place + 1]
    silent = replace(conversation, messages=[*before, {key: turn[key] for key in turn if key != "tool_calls"}])
    if renderer.texts(silent, [place + 1], renderer.variables(conversation)[0], generation=False) == [whole]:
        raise RowRejected("calls_not_written", f"turn {place}: the chat template does not render tool calls")


def _served_turn(
    conversation: Conversation, place: int, pairs: Sequence[tuple[str, str]], renderer: Renderer, encoder: Encoder
) -> _Turn:
    """The turn behind the longest generation prompt that its rendering continues."""
    message = conversation.messages[place]
    fitting = [(prompt, whole) for prompt, whole in pairs if whole.startswith(prompt)]
    if not fitting:
        return _raw_turn(conversation, place, pairs[0], renderer, encoder)
    prompt, whole = max(fitting, key=lambda pair: len(pair[0]))
    rest = whole[len(prompt) :]
    _, end, notes = _closing(rest, place, encoder)
    answer = rest[:end]
    if not renderer.has_generation_prompt and _has_header(message, answer):
        notes = (*notes, "header_supervised")
    lead = _empty_thought(message, answer)
    return _Turn(place, prompt, answer, lead, (*notes, "empty_thought") if lead else notes)


def _has_header(message: Mapping[str, Any], answer: str) -> bool:
    """Whether something stands before the text of an answer without thought."""
    own = str(message["content"]).strip()
    return bool(own) and not message.get("reasoning_content") and not answer.lstrip().startswith(own)


def _empty_thought(message: Mapping[str, Any], answer: str) -> int:
    """Characters of think tags before the answer that the template wrote and no one thought; they are not learned."""
    content = message.get("content")
    found = None if message.get("reasoning_content") else _EMPTY_THOUGHT.match(answer)
    if found is None or not isinstance(content, str):
        return 0
    own = content.strip()
    follows = answer.startswith(own, found.end()) if own else bool(message.get("tool_calls"))
    if not follows:
        return 0
    # White space that the answer itself starts with is the answer's, where the template did not take it away.
    before = content[: len(content) - len(content.lstrip())]
    behind_tags = found.group()[len(found.group().rstrip()) :]
    return found.end() - len(before) if own and behind_tags.endswith(before) else found.end()


def _raw_turn(
    conversation: Conversation, place: int, pair: tuple[str, str], renderer: Renderer, encoder: Encoder
) -> _Turn:
    """The turn where its rendering leaves the generation prompt: the prompt opens a thought that history drops."""
    message = conversation.messages[place]
    prompt, whole = pair
    content = message.get("content")
    opened = _OPEN_THOUGHT.search(prompt)
    if opened is None or not isinstance(content, str):
        raise RowRejected("not_continued", f"turn {place}: the template's answer does not start with its own prompt")
    closing = f"</{opened.group(1)}>"
    thought = message.get("reasoning_content") or ""
    if closing in content:
        written = re.sub(rf"^\s*<{opened.group(1)}>", "", content).lstrip("\n")
    elif thought:
        written = f"{thought.strip(chr(10))}\n{closing}\n\n{content.lstrip(chr(10))}"
    else:
        raise RowRejected("no_reasoning", f"turn {place}: the generation prompt opens a thought, the row has none")
    (history,) = renderer.texts(conversation, [place], renderer.variables(conversation)[0], generation=False)
    if not whole.startswith(history):
        raise RowRejected("not_continued", f"turn {place}: the template rewrites what stands before it")
    turn = whole[len(history) :]
    start, end, notes = _closing(turn, place, encoder)
    after = _end_of(content.split(closing)[-1].strip(), turn[:start], bool(message.get("tool_calls")), place)
    return _Turn(place, prompt, written.rstrip() + turn[after:end], 0, notes)


def _end_of(answer: str, turn: str, calls: bool, place: int) -> int:
    """Where an answer ends in a turn without its closing: at the turn's end, or before the calls that follow it."""
    body = turn.rstrip()
    if answer and body.endswith(answer):
        return len(body)
    if not answer or not calls or turn.count(answer) != 1:
        raise RowRejected("not_continued", f"turn {place}: the answer cannot be placed in what the template wrote")
    return turn.index(answer) + len(answer)


def _closing(text: str, place: int, encoder: Encoder) -> tuple[int, int, tuple[str, ...]]:
    """Where what closes the rendered rest of a turn starts and ends: the first end token, where there is one.

    Raises:
        SetAside: more than white space and special tokens follow the end token, at which a server would have stopped.
    """
    match = encoder.end_pattern.search(text) if encoder.end_pattern else None
    if match:
        rest = encoder.special_pattern.sub("", text[match.end() :]) if encoder.special_pattern else text[match.end() :]
        if rest.strip():
            raise RowRejected("end_token_inside", f"turn {place}: {match.group()!r} comes before {rest.strip()[:40]!r}")
        return match.start(), match.end(), ()
    # The turn is closed by something that is no end token of the tokenizer: a last special token, or nothing.
    closings = list(encoder.special_pattern.finditer(text)) if encoder.special_pattern else []
    if closings and not text[closings[-1].end() :].strip():
        return closings[-1].start(), closings[-1].end(), ("closing_is_no_end_token",)
    end = len(text.rstrip())
    return end, end, ("no_closing_token",)


def _refuse_end_tokens(message: Mapping[str, Any], place: int, encoder: Encoder) -> None:
    if encoder.end_pattern is None:
        return
    for key in ("content", "reasoning_content"):
        text = message.get(key)
        found = encoder.end_pattern.search(text) if isinstance(text, str) else None
        if found:
            raise RowRejected("end_token_inside", f"turn {place} holds {found.group()!r}")


def _tokenize(turn: _Turn, encoder: Encoder, memory: dict[str, list[int]]) -> None:
    turn.prompt_ids = encoder.encode(turn.prompt, memory)
    border = len(turn.prompt_ids)
    ids = encoder.continued(turn.prompt, turn.prompt_ids, turn.answer, memory)
    if ids[:border] != turn.prompt_ids:
        ids = turn.prompt_ids + encoder.encode(turn.answer, memory)
        turn.merged = True
        turn.notes += ("merged_border",)
        if encoder.decode(ids) != turn.prompt + turn.answer:
            raise RowRejected("border", f"turn {turn.place}: the answer cannot be split from its prompt in tokens")
    turn.ids = ids
    turn.start = border
    # A token that reaches over the end of the lead belongs to it: the target never had the choice.
    while turn.lead and turn.start < len(ids) and len(encoder.decode(ids[border : turn.start])) < turn.lead:
        turn.start += 1


def _is_prefix(turn: _Turn, last: _Turn) -> bool:
    return len(turn.ids) <= len(last.ids) and last.ids[: len(turn.ids)] == turn.ids


def _sample(last: _Turn, inside: Sequence[_Turn], conversation: Conversation) -> Sample:
    spans = [edge for turn in inside for edge in (turn.start, len(turn.ids)) if turn.start < len(turn.ids)]
    notes = tuple(dict.fromkeys(note for turn in inside for note in turn.notes))
    return Sample(
        np.asarray(last.ids, dtype=np.int32),
        np.asarray(spans, dtype=np.int32),
        notes,
        conversation.tags,
    )


def _noted(sample: Sample, note: str) -> Sample:
    return Sample(sample.ids, sample.spans, (*sample.notes, note), sample.tags)
