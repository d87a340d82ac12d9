"""Which tokens of a conversation the target would have generated: loss masks that cannot disagree with serving.

For each assistant turn the conversation before it is rendered with the generation prompt, as a server does. The turn
is supervised from the first token after that prompt to the end token at which a server stops, both included, and
nothing else is. The prompt's tokens are those of the prompt read alone, as a server reads it, even where a token of
the whole text would reach across the border.

Several turns share one sample where each one's prompt and answer are, token for token, a prefix of the sample.
Where the template rewrites earlier turns (thinking taken out of the history), they get a separate sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.data.assistant_turn import said_by_place
from paceline.data.chat_template import Renderer, Variables
from paceline.data.encoder import Encoder
from paceline.data.rows import Conversation, PlainText, ReadyTokens, RowRejected
from paceline.data.served_turn import ServedTurn, TurnFinder
from paceline.data.tags import conversation_tags


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

    @property
    def supervised(self) -> int:
        """Supervised tokens."""
        # Of a few numbers Python's sums are faster than numpy's: 1 µs, not 4.
        edges = self.spans.tolist()
        return sum(edges[1::2]) - sum(edges[::2])


def mask_of(spans: np.ndarray, length: int) -> np.ndarray:
    """Loss mask, bool [length], of flat (start, end) spans."""
    mask, edges = np.zeros(length, dtype=bool), spans.tolist()
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        mask[start:end] = True
    return mask


def spans_of(mask: np.ndarray) -> np.ndarray:
    """Flat (start, end) spans, int32, of a loss mask."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], np.asarray(mask, dtype=bool), [False]))))
    return edges.astype(np.int32)


def samples_of(
    conversation: Conversation,
    renderer: Renderer,
    encoder: Encoder,
    *,
    on_not_written: str = "drop",
) -> list[Sample]:
    """The training samples of a conversation.

    Args:
        conversation: with at least one assistant turn after a user turn.
        renderer, encoder: of the target.
        on_not_written: where the template does not write a thought or a call, `drop` rejects the conversation, `text`
            supervises the text alone.

    Returns:
        One sample, or several in the order of the turns where the template rewrites earlier turns, so that they
        cannot share one.

    Raises:
        RowRejected: the template refuses it, does not write everything, or an answer holds an end token.
    """
    memory: dict[str, list[int]] = {}
    turns, held = _served_or_text(conversation, renderer, encoder, on_not_written)
    for turn in turns:
        _tokenize(turn, encoder, memory, conversation.token_ids.get(turn.place, ()))
    tags = tuple(dict.fromkeys((*conversation.tags, *conversation_tags(held))))
    samples: list[Sample] = []
    left = turns
    while left:
        last = left[-1]
        inside = [turn for turn in left if turn is last or _is_prefix(turn, last)]
        taken = {turn.place for turn in inside}
        left = [turn for turn in left if turn.place not in taken]
        samples.append(_sample(last, inside, tags))
    samples.reverse()
    if len(samples) > 1:
        samples = [_noted(sample, "history_rewritten") for sample in samples]
    if held is not conversation:
        samples = [_noted(sample, "text_alone") for sample in samples]
    return samples


def plain_sample(row: PlainText, encoder: Encoder) -> Sample:
    """Plain text: every token is supervised but those that the tokenizer puts in front."""
    ids = encoder.tokenizer.encode(row.text)
    first = 0
    while first < len(ids) and ids[first] in encoder.special_ids:
        first += 1
    spans = np.asarray([first, len(ids)] if first < len(ids) else [], dtype=np.int32)
    return Sample(np.asarray(ids, dtype=np.int32), spans, ("plain_text",), (*row.tags, *conversation_tags(row)))


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


def check_generation_tags(conversation: Conversation, renderer: Renderer, encoder: Encoder) -> None:
    """Compare the supervised text with what the template's own generation tags enclose.

    Both must agree on every answer of the conversation that the history keeps, up to the end token and whitespace,
    which some templates leave outside their tags, and the turn's header, which some have inside.

    Raises:
        RowRejected: they disagree; shows both.
    """
    turns, variables = _served(conversation, renderer, encoder)
    text, tagged = renderer.tagged(conversation, turns[-1].place + 1, variables)
    kept = [turn for turn in turns if text.startswith(turn.prompt + turn.answer)]
    if not kept:
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
            raise RowRejected(
                "tags_disagree",
                f"turn {turn.place}: the chat template's generation tags mark {theirs[:80]!r}, but a server would have "
                f"the target write {ours[:80]!r}",
            )


def _bare(text: str, encoder: Encoder) -> str:
    return (encoder.special_pattern.sub("", text) if encoder.special_pattern else text).strip()


def _served(conversation: Conversation, renderer: Renderer, encoder: Encoder) -> tuple[list[ServedTurn], Variables]:
    """The supervised turns of a conversation, all in one mode, and the template's variables of that mode.

    Raises:
        RowRejected: in no mode does the template write what the row holds, or nothing is to be supervised.
    """
    asked = next(place for place, turn in enumerate(conversation.messages) if turn["role"] == "user")
    said = said_by_place(conversation.messages)
    places = [place for place in said if place > asked]
    if not places:
        raise RowRejected("no_assistant", "the only answer is before the first question")
    places = [place for place in places if place not in conversation.without_loss]
    if not places:
        raise RowRejected("nothing_supervised", "no assistant turn is to be learned (weight, loss or train)")
    refusals: list[RowRejected] = []
    for variables in renderer.modes(conversation, any(turn.thought for turn in said.values())):
        for form in renderer.forms(conversation, said):
            try:
                return TurnFinder(form, said, variables, renderer, encoder).turns(places), variables
            except RowRejected as refused:
                refusals.append(refused)
    # The first that says more than that the template cannot read this form.
    raise next((found for found in refusals if found.reason != "template_refuses"), refusals[0])


def _served_or_text(
    conversation: Conversation, renderer: Renderer, encoder: Encoder, on_not_written: str
) -> tuple[list[ServedTurn], Conversation]:
    """The supervised turns, and the conversation that they hold: without thoughts, or also without calls, where the
    text alone is meant and the template does not write them."""
    try:
        return _served(conversation, renderer, encoder)[0], conversation
    except RowRejected as refused:
        if refused.reason != "not_written" or on_not_written == "drop":
            raise
    said = said_by_place(conversation.messages)
    for dropped in (("reasoning_content",), ("reasoning_content", "tool_calls")):
        messages = list(conversation.messages)
        for place, turn in said.items():
            rest = {key: value for key, value in messages[place].items() if key not in dropped}
            messages[place] = {**rest, "content": turn.text}
        less = replace(conversation, messages=messages)
        try:
            return _served(less, renderer, encoder)[0], less
        except RowRejected as refused:
            if refused.reason != "not_written" or "tool_calls" in dropped:
                raise
    raise AssertionError("the last attempt returns or raises")


def _tokenize(turn: ServedTurn, encoder: Encoder, memory: dict[str, list[int]], known: Sequence[int]) -> None:
    """Tokens of the prompt read alone, as a server reads it, and of the answer behind it.

    Args:
        turn: gets its ids.
        encoder, memory: see `Encoder`.
        known: ids of the answer as the server returned them; used where they are those of the answer's text.
    """
    turn.prompt_ids, ids = encoder.continued(turn.prompt, turn.answer, memory)
    border = len(turn.prompt_ids)
    written = known[:-1] if known and known[-1] in encoder.end_ids else known
    if written and encoder.decode(written) == turn.answer[: turn.end]:
        ids = [*turn.prompt_ids, *written, *encoder.encode(turn.answer[turn.end :], memory)]
    if ids[:border] != turn.prompt_ids:
        ids = turn.prompt_ids + encoder.encode(turn.answer, memory)
        turn.notes += ("merged_border",)
        if encoder.decode(ids) != turn.prompt + turn.answer:
            raise RowRejected("border", f"turn {turn.place}: the answer cannot be split from its prompt in tokens")
    turn.ids = ids
    turn.start = border
    # A token that reaches over the end of the lead belongs to it: the target never had the choice.
    while turn.lead and turn.start < len(ids) and len(encoder.decode(ids[border : turn.start])) < turn.lead:
        turn.start += 1


def _is_prefix(turn: ServedTurn, last: ServedTurn) -> bool:
    return len(turn.ids) <= len(last.ids) and last.ids[: len(turn.ids)] == turn.ids


def _sample(last: ServedTurn, inside: Sequence[ServedTurn], tags: tuple[str, ...]) -> Sample:
    spans = [edge for turn in inside for edge in (turn.start, len(turn.ids)) if turn.start < len(turn.ids)]
    notes = tuple(dict.fromkeys(note for turn in inside for note in turn.notes))
    return Sample(
        np.asarray(last.ids, dtype=np.int32),
        np.asarray(spans, dtype=np.int32),
        notes,
        tags,
    )


def _noted(sample: Sample, note: str) -> Sample:
    return Sample(sample.ids, sample.spans, (*sample.notes, note), sample.tags)
