"""One assistant turn as it is served: the prompt that a server sends, and what the target writes behind it.

The prompt is the conversation before the turn, rendered with the generation prompt. What the target writes is found
in the conversation rendered with the turn. Mostly the second begins with the first. Where it does not, either the
prompt ends with an opened or an empty thought that the template does not write into turns, or the template renders
what came before otherwise once the answer follows; then the turn's part is found, and put behind the prompt as served.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.data.assistant_turn import Said, not_written, said_by_place
from paceline.data.chat_template import Renderer, Variables
from paceline.data.encoder import Encoder
from paceline.data.rows import Conversation, RowRejected
from paceline.data.thinking import EMPTY_MARKS, EMPTY_THOUGHT, REASONING_KEYS, mark_at_end
from paceline.types import JsonDict


@dataclass(slots=True)
class ServedTurn:
    """One assistant turn as it is served.

    Attributes:
        place: of the turn in its conversation.
        prompt: what a server sends.
        answer: what the target writes, up to and with what ends it.
        end: where what ends the answer starts in it.
        lead: characters of the answer's beginning that the template wrote and the row does not hold: not supervised.
        notes: keys of `report.NOTES`.
        prompt_ids, ids: of the prompt, and of prompt and answer.
        start: first supervised token.
    """

    place: int
    prompt: str
    answer: str
    end: int
    lead: int = 0
    notes: tuple[str, ...] = ()
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    start: int = 0


class TurnFinder:
    """Finds the served turns of one conversation, rendered in one form with one set of variables.

    Args:
        conversation: in a form of `Renderer.forms`.
        said: its assistant turns by place, as the row has them.
        variables: of the template.
        renderer, encoder: of the target.
    """

    def __init__(
        self,
        conversation: Conversation,
        said: Mapping[int, Said],
        variables: Variables,
        renderer: Renderer,
        encoder: Encoder,
    ) -> None:
        self.conversation = conversation
        self.said = said
        self.thinks = any(turn.thought for turn in said.values())
        self.variables = variables
        self.renderer = renderer
        self.encoder = encoder

    def turns(self, places: Sequence[int]) -> list[ServedTurn]:
        """The served turns at some places.

        Raises:
            RowRejected: a turn that cannot be served so, or of which the template does not write everything.
        """
        prompts = self._texts(places, generation=True)
        wholes = self._texts([place + 1 for place in places], generation=False)
        return [self._turn(*found) for found in zip(places, prompts, wholes, strict=True)]

    def _texts(self, ends: Sequence[int], *, generation: bool) -> list[str]:
        return self.renderer.texts(self.conversation, ends, self.variables, generation=generation)

    def _turn(self, place: int, prompt: str, whole: str) -> ServedTurn:
        said = self.said[place]
        self._refuse_end_tokens(place)
        answer, end, notes = self._closed(place, self._answer(place, prompt, whole))
        if said.thought and EMPTY_MARKS.match(answer):
            raise RowRejected("not_written", f"turn {place}: the chat template writes an empty thought{_WAY_OUT}")
        lead = 0 if said.thought or said.inline else empty_thought(said, answer)
        if lost := not_written(said, answer[lead:end]):
            raise RowRejected("not_written", f"turn {place}: the chat template does not write {lost}{_WAY_OUT}")
        if lead:
            notes = (*notes, "empty_thought")
        if not self.renderer.has_generation_prompt and _has_header(said, answer):
            notes = (*notes, "header_supervised")
        return ServedTurn(place, prompt, answer, end, lead, notes)

    def _answer(self, place: int, prompt: str, whole: str) -> str:
        """What the target writes behind the prompt, with all that the template puts behind the answer.

        Raises:
            RowRejected: it cannot be found, or the prompt opens a thought and the row has none.
        """
        said = self.said[place]
        opened, closed = mark_at_end(prompt)
        mark = opened or closed
        # A mark at the prompt's end says whether to think; turns that were answered may not hold it.
        base = prompt[: mark.start()] if mark else prompt
        rest = whole[len(prompt) :] if whole.startswith(prompt) else None
        behind_mark = rest is not None
        if rest is None and whole.startswith(base):
            rest = whole[len(base) :]
        if rest is None:
            rest, behind_mark = self._behind_other_history(place, prompt, base, whole)
        if opened and not said.thought and not said.inline and not (behind_mark and self.thinks):
            raise RowRejected(
                "no_reasoning",
                f"turn {place}: the generation prompt opens a thought, the turn has none; with weight 0 it stays as "
                "context",
            )
        if behind_mark and said.thought.strip() in rest and not empty_thought(said, rest):
            return rest
        bare = rest[empty_thought(said, rest) :]
        if opened and (said.thought or said.inline):
            return _opened_thought(said, prompt, opened) + bare.lstrip()
        if said.thought and mark is None and (marks := self.renderer.thought_marks(self.variables)):
            return marks[0] + said.thought.strip() + marks[1] + bare
        return rest if behind_mark else bare

    def _behind_other_history(self, place: int, prompt: str, base: str, whole: str) -> tuple[str, bool]:
        """The turn where the template renders what came before otherwise once the answer follows.

        Rendered with other words in the answer, the text is the same up to the answer's first word. The turn starts
        behind the last place in that part which reads like the end of the prompt: from the last message before the
        answer on, or from the turn's header on. That message must not follow it once more.

        Returns:
            What follows the prompt, or its base; and whether it is the prompt.
        """
        *before, message = self.conversation.messages[: place + 1]
        reworded = replace(self.conversation, messages=[*before, _reworded(message, self.said[place])])
        (other,) = self.renderer.texts(reworded, [place + 1], self.variables, generation=False)
        shared = os.path.commonprefix([whole, other])  # noqa: RUF071 (of texts, not of paths)
        (history,) = self._texts([place], generation=False)
        header = prompt.removeprefix(history) if prompt.startswith(history) else ""
        asked = str(before[-1].get("content", "")).strip()
        for text, is_prompt in ((prompt, True), (base, False)):
            opening = text[len(history) :] if text.startswith(history) else ""
            for known in (text[text.rfind(asked) :] if asked and asked in text else "", opening):
                at = shared.rfind(known) + len(known)
                if known and known in shared and not (asked and asked in shared[at:]):
                    return whole[at:], is_prompt
        if asked and asked in prompt and asked in shared:
            closing, behind = prompt.removesuffix(header).rpartition(asked)[2], shared.rpartition(asked)[2]
            if closing.startswith(behind) and not self._bare(closing[len(behind) :]):
                return whole[len(shared) :], False  # the answer continues the turn before it, without a header
        raise RowRejected(
            "not_continued",
            f"turn {place}: once the answer follows, the chat template renders what comes before it otherwise, and the "
            "answer cannot be found in it; give such turns as separate rows, or with weight 0",
        )

    def _closed(self, place: int, text: str) -> tuple[str, int, tuple[str, ...]]:
        """The answer up to and with what ends it, and where that starts: the first end token, where there is one.

        Raises:
            RowRejected: more than white space and special tokens follow the end token, at which a server would have
                stopped.
        """
        encoder = self.encoder
        if match := encoder.end_pattern.search(text) if encoder.end_pattern else None:
            if rest := self._bare(text[match.end() :]):
                raise RowRejected("end_token_inside", f"turn {place}: {match.group()!r} comes before {rest[:40]!r}")
            return text[: match.end()], match.start(), ()
        if marker := self._next_marker(place):
            return text + marker, len(text), ()
        # The turn is closed by something that is not an end token: a last special token, or nothing.
        closings = list(encoder.special_pattern.finditer(text)) if encoder.special_pattern else []
        if closings and not text[closings[-1].end() :].strip():
            return text[: closings[-1].end()], closings[-1].start(), ("closing_is_no_end_token",)
        end = len(text.rstrip())
        return text[:end], end, ("no_closing_token",)

    def _bare(self, text: str) -> str:
        """Text without special tokens and white space around it."""
        pattern = self.encoder.special_pattern
        return (pattern.sub("", text) if pattern else text).strip()

    def _next_marker(self, place: int) -> str:
        """The end token with which the next turn opens, where the template writes it directly behind an answer."""
        calls = bool(self.said[place].calls)
        # Where a user or a tool does not come next, the target stops as if one did.
        next_role = "tool" if calls else "user"
        pattern, follower = self.encoder.end_pattern, self.renderer.follows_answer(next_role, calls)
        found = pattern and pattern.match(follower)
        return found.group() if found else ""

    def _refuse_end_tokens(self, place: int) -> None:
        said, pattern = self.said[place], self.encoder.end_pattern
        if not (said.thought or said.text.strip() or said.calls):
            raise RowRejected("empty_text", f"turn {place} of the assistant says nothing")
        for text in (said.text, said.thought):
            if pattern and (found := pattern.search(text)):
                raise RowRejected("end_token_inside", f"turn {place} holds {found.group()!r}")


def served_prompt(conversation: Conversation, end: int, renderer: Renderer) -> tuple[str, Variables]:
    """What a server sends for the answer at `end`: the turns before it, in the mode of the whole conversation.

    Returns:
        The text, and the variables of the template.

    Raises:
        RowRejected: the template refuses the turns.
    """
    said = said_by_place(conversation.messages)
    thinks = any(turn.thought for turn in said.values()) if said else None
    variables = renderer.modes(conversation, thinks)[0]
    refused: RowRejected | None = None
    for form in renderer.forms(conversation, said):
        try:
            return renderer.texts(form, [end], variables, generation=True)[0], variables
        except RowRejected as error:
            refused = refused or error
    assert refused is not None
    raise refused


_WAY_OUT = "; put it into the content as the target writes it, or set data.on_not_written to text"


def empty_thought(said: Said, answer: str) -> int:
    """Characters of an empty thought before the answer that the template wrote and nobody thought."""
    found = EMPTY_THOUGHT.match(answer)
    if found is None:
        return 0
    own = said.text.strip()
    if not (answer.startswith(own, found.end()) if own else said.calls):
        return 0
    # White space that the answer itself starts with is the answer's, where the template did not take it away.
    before = said.text[: len(said.text) - len(said.text.lstrip())]
    behind_tags = found.group()[len(found.group().rstrip()) :]
    return found.end() - len(before) if own and behind_tags.endswith(before) else found.end()


def _opened_thought(said: Said, prompt: str, opened: re.Match[str]) -> str:
    """The thought that the prompt opened, up to where the answer's text starts, as the target writes it."""
    if said.inline:
        tag, thought, closing = said.inline
        # The line end behind the tag is the prompt's already.
        return (thought.removeprefix("\n") if tag and prompt.endswith("\n") else thought) + closing
    closing = f"</{opened['tag']}>" if opened["tag"] else f"[/{opened['word']}]"
    # The same white space inside the closing mark as inside the opening one.
    return said.thought.strip("\n") + (f"\n{closing}\n\n" if prompt.endswith("\n") else closing)


def _reworded(message: JsonDict, said: Said) -> JsonDict:
    """The turn with another first word in each of its parts."""

    def other(text: str) -> str:
        return text if not text.strip() else "0 other" if text.strip()[0] != "0" else "1 other"

    content: Any = other(said.text)
    if isinstance(message["content"], list):
        content = [{**part, part["type"]: other(part[part["type"]])} for part in message["content"]]
    elif said.inline and message["content"] != said.text:
        content = said.inline[0] + other(said.inline[1]) + said.inline[2] + content
    turn = {**message, "content": content}
    for key in REASONING_KEYS:
        if turn.get(key):
            turn[key] = other(turn[key])
    if said.calls:
        turn["tool_calls"] = [
            {**call, "function": {**call["function"], "name": other(call["function"]["name"])}}
            for call in message["tool_calls"]
        ]
    return turn


def _has_header(said: Said, answer: str) -> bool:
    """Whether something is before the text of an answer without thought."""
    own = said.text.strip()
    return bool(own) and not said.thought and not answer.lstrip().startswith(own)
