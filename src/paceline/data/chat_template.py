"""Conversations as the target's own chat template writes them, in the mode in which they are served."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paceline.data.assistant_turn import Said
from paceline.data.render_limits import SECONDS, TooSlow, limited_time
from paceline.data.rows import Conversation, RowRejected
from paceline.data.thinking import EMPTY_THOUGHT, REASONING_KEYS, ThinkingSwitch, find_switches, read_source
from paceline.data.tokenizer import chat_template
from paceline.errors import DataError
from paceline.types import JsonDict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Variables = Mapping[str, Any]
"""What a template gets beside messages and tools."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"})
"""Variables that every renderer hands to every template."""
_CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"a": "b"}}}
_REASONING = frozenset(REASONING_KEYS)
_QUESTION: JsonDict = {"role": "user", "content": "question"}
_ANSWER: JsonDict = {"role": "assistant", "content": "answer"}


class Renderer:
    """Renders conversations with one tokenizer's chat template, as `apply_chat_template` does.

    Args:
        tokenizer: of the target.
        thinking: `on` and `off` set the template's switch for thinking; with `auto` each conversation shows whether its
            answers hold thoughts. A row's own template variables win.
        switches: further variables for every conversation.

    Raises:
        DataError: the tokenizer has no chat template, or one that is not valid Jinja; a setting that the template does
            not read.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, thinking: str = "auto", switches: Variables | None = None
    ) -> None:
        from jinja2.exceptions import TemplateSyntaxError

        name, template = tokenizer.name_or_path, chat_template(tokenizer)
        if template is None:
            raise DataError(
                f"{name}: the tokenizer has no chat template, so chats cannot be rendered as they will be served; give "
                "a target with one, or data in `text` or `input_ids` form"
            )
        self._name = name
        self._template = template
        self._tool_template = chat_template(tokenizer, tools=True) or template
        self._special = dict(tokenizer.special_tokens_map)
        self._thinking = thinking
        self._always = dict(switches or {})
        try:
            # Chats with tools may have another template: what it reads counts too.
            self.source = read_source("".join(dict.fromkeys((template, self._tool_template))))
        except TemplateSyntaxError as error:
            raise DataError(f"{name}: line {error.lineno} of its chat template is broken: {error}") from error
        self.has_generation_tags = _GENERATION_TAG.search(template) is not None
        self.writes_the_date = "strftime_now" in template
        self._check_settings(name)

    def _check_settings(self, name: str) -> None:
        """Refuse settings without effect."""
        read = sorted(self.source.variables - _GIVEN - self._special.keys())
        errors = [
            f"data.template_switches: {key}: the chat template of {name} does not read it; it reads "
            f"{', '.join(read) or 'no variables'}"
            for key in self._always
            if key not in read
        ]
        if self._thinking != "auto" and not self.switches:
            errors.append(
                f"data.thinking = {self._thinking}: the chat template of {name} has no switch for thinking (it reads "
                f"{', '.join(read) or 'no variables'}); leave it at auto, or give data.template_switches"
            )
        if errors:
            raise DataError(*errors)

    @cached_property
    def switches(self) -> list[ThinkingSwitch]:
        """The template's variables that turn thinking on and off."""
        thoughtful = {**_ANSWER, **dict.fromkeys(REASONING_KEYS, "thought")}

        def render(variables: Variables) -> tuple[str, str] | None:
            """A question's prompt, and the chat with an answer that holds a thought; None where it is refused."""
            chat = Conversation([_QUESTION, thoughtful])
            variables = {**self._always, **variables}
            try:
                (prompt,) = self.texts(chat, [1], variables, generation=True)
                (whole,) = self.texts(chat, [2], variables, generation=False)
            except RowRejected:
                return None
            return prompt, whole

        return [found for found in find_switches(self.source, render) if found.name not in self._always]

    def modes(self, conversation: Conversation, thinks: bool | None) -> list[Variables]:
        """Variables with which a server renders the prompts of a conversation, the likeliest first.

        Args:
            conversation: whose own variables win.
            thinks: whether its answers hold thoughts; None where it has no answers.
        """
        given = {**self._always, **conversation.template}
        if conversation.served or not self.switches or any(switch.name in given for switch in self.switches):
            return [given]
        switch = self.switches[0]
        if self._thinking != "auto":
            return [{**given, **(switch.on if self._thinking == "on" else switch.off)}]
        if thinks is None:
            return [given]
        return [{**given, **switch.on}, given] if thinks else [{**given, **switch.off}]

    def found_by_content(self, conversation: Conversation, variables: Variables) -> Variables:
        """Of a mode of `modes`, what neither the row nor a setting says and the template does not do by itself.

        A server must be given these variables to send the same prompts.
        """
        switch = next(iter(self.switches), None)
        if switch is None or self._thinking != "auto" or variables == {**self._always, **conversation.template}:
            return {}
        given = switch.on if variables.items() >= switch.on.items() and switch.on else switch.off
        return {} if switch.default and given == getattr(switch, switch.default) else given

    def forms(self, conversation: Conversation, said: Mapping[int, Said]) -> Iterator[Conversation]:
        """The conversation in the forms in which its template may read thoughts and calls.

        Args:
            conversation: of a row.
            said: its assistant turns by place.
        """
        forms = [conversation.messages]
        if any(turn.thought for turn in said.values()):
            keys = [key for key in REASONING_KEYS if key in self.source.keys]
            forms = [_with_thoughts_as(key, conversation.messages, said) for key in keys]
            if {"text", "thinking"} <= self.source.keys:
                forms.append(_with_thoughts_as(None, conversation.messages, said))
            if not forms or any(turn.inline for turn in said.values()):
                forms.append(conversation.messages)
        ways: list[list[Callable[[JsonDict], JsonDict]]] = [[]]
        if any(turn.calls for turn in said.values()):
            ways += [[_with_argument_text]]
        if "text" in self.source.keys:  # of templates that read images too, some want text as parts
            ways += [[*way, _in_parts] for way in ways]
        for way in ways:
            for messages in forms:
                for change in way:
                    messages = [change(message) for message in messages]
                yield conversation if messages is conversation.messages else replace(conversation, messages=messages)

    def texts(
        self, conversation: Conversation, ends: Sequence[int], variables: Variables, *, generation: bool
    ) -> list[str]:
        """The conversation up to each of `ends` (turns, exclusive), with or without the generation prompt.

        Raises:
            RowRejected: the template refuses the conversation (`template_refuses`).
            DataError: it takes more time or memory than any template needs.
        """
        return self._render(conversation, ends, variables, generation=generation, spans=False)[0]

    def tagged(self, conversation: Conversation, end: int, variables: Variables) -> tuple[str, list[tuple[int, int]]]:
        """Text of the first `end` turns, and the character spans that the template's generation tags enclose."""
        texts, spans = self._render(conversation, [end], variables, generation=False, spans=True)
        return texts[0], spans[0]

    @cached_property
    def has_generation_prompt(self) -> bool:
        """Whether asking for a generation prompt makes a difference."""
        question = Conversation([_QUESTION])
        try:
            texts = [self.texts(question, [1], self._always, generation=asked) for asked in (True, False)]
        except RowRejected:
            return "add_generation_prompt" in self._template
        return texts[0] != texts[1]

    def follows_answer(self, role: str, calls: bool) -> str:
        """What directly follows the answer of an assistant when a turn of `role` comes next, up to that turn's content.

        "" where it is not known.
        """
        if (role, calls) not in self._followers:
            self._followers[role, calls] = self._find_follower(role, calls)
        return self._followers[role, calls]

    @cached_property
    def _followers(self) -> dict[tuple[str, bool], str]:
        return {}

    def _find_follower(self, role: str, calls: bool) -> str:
        answer = {**_ANSWER, "tool_calls": [_CALL]} if calls else _ANSWER
        chat = Conversation([_QUESTION, answer, {"role": role, "content": "later", "tool_call_id": "abcdefghi"}])
        try:
            alone, followed = self.texts(chat, [2, 3], self._always, generation=False)
        except RowRejected:
            return ""
        return followed[len(alone) :].partition("later")[0] if followed.startswith(alone) else ""

    def thought_marks(self, variables: Variables) -> tuple[str, str] | None:
        """What the template writes before and behind a thought, where it writes one beside calls or in earlier turns.

        Found by rendering a turn with and without a thought: a template that writes the thoughts of final answers
        nowhere shows there how the target writes them.
        """
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._marks:
            self._marks[key] = self._find_marks(variables)
        return self._marks[key]

    @cached_property
    def _marks(self) -> dict[str, tuple[str, str] | None]:
        return {}

    def _find_marks(self, variables: Variables) -> tuple[str, str] | None:
        thought = dict.fromkeys(("reasoning_content", "thinking"), "a thought")
        for answer, later in (({**_ANSWER, "content": "", "tool_calls": [_CALL]}, []), (_ANSWER, [_QUESTION])):
            plain, thoughtful = ([_QUESTION, {**answer, **more}, *later] for more in ({}, thought))
            try:
                (prompt,) = self.texts(Conversation(plain), [1], variables, generation=True)
                (without,) = self.texts(Conversation(plain), [len(plain)], variables, generation=False)
                (written,) = self.texts(Conversation(thoughtful), [len(plain)], variables, generation=False)
            except RowRejected:
                continue
            before, found, behind = written.removeprefix(prompt).partition("a thought")
            if not (found and written.startswith(prompt) and without.startswith(prompt)):
                continue
            answered = without.removeprefix(prompt)
            if empty := EMPTY_THOUGHT.match(answered):
                answered = answered[empty.end() :]
            if answered and behind.endswith(answered):
                return before, behind.removesuffix(answered)
        return None

    def _render(
        self, conversation: Conversation, ends: Sequence[int], variables: Variables, *, generation: bool, spans: bool
    ) -> tuple[list[str], list[list[tuple[int, int]]]]:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tool_template if conversation.tools else self._template
        chats: list[list[JsonDict]] = [conversation.messages[:end] for end in ends]
        named = {"tools": conversation.tools, "add_generation_prompt": generation, **self._special, **variables}
        try:
            with limited_time():
                # A thought makes transformers fill in the other names under which templates read it.
                if not spans and all(map(_REASONING.isdisjoint, conversation.messages)):
                    return [self._compiled[template](messages=chat, **named) for chat in chats], []
                # Typed as one string upstream; it is a list for a list of chats, and so are the spans.
                render: Any = render_jinja_template
                return render(conversations=chats, chat_template=template, return_assistant_tokens_mask=spans, **named)
        except (TooSlow, MemoryError) as error:
            what = f"has not ended after {SECONDS:g} s" if isinstance(error, TooSlow) else "asks for too much memory"
            raise DataError(
                f"{self._name}: its chat template {what} on a chat of {len(conversation.messages)} turns; correct it"
            ) from error
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            lines = str(error).splitlines()
            raise RowRejected("template_refuses", lines[0] if lines else type(error).__name__) from error

    @cached_property
    def _compiled(self) -> dict[str, Callable[..., str]]:
        return {template: _compiled(template) for template in (self._template, self._tool_template)}


def _compiled(template: str) -> Callable[..., str]:
    """A function that renders a template, variables → text.

    It does what `render_jinja_template` does with plain JSON, without its copies of every chat and of all globals:
    15 µs for a chat of 36 tokens, 45 µs with them.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled: Any = _compile_jinja_template(template)
    names, environment = {**compiled.globals, "documents": None}, compiled.environment

    def render(**variables: Any) -> str:
        context = environment.context_class(environment, {**names, **variables}, compiled.name, compiled.blocks)
        return "".join(compiled.root_render_func(context))

    return render


def _with_thoughts_as(key: str | None, messages: Sequence[JsonDict], said: Mapping[int, Said]) -> list[JsonDict]:
    """The messages with each thought under one key, or (None) as a part of the content."""
    turned = list(messages)
    for place, turn in said.items():
        if turn.thought:
            rest = {name: value for name, value in messages[place].items() if name not in REASONING_KEYS}
            parts = [{"type": "thinking", "thinking": turn.thought}, {"type": "text", "text": turn.text}]
            turned[place] = {**rest, "content": turn.text, key: turn.thought} if key else {**rest, "content": parts}
    return turned


def _in_parts(message: JsonDict) -> JsonDict:
    content = message["content"]
    return message if isinstance(content, list) else {**message, "content": [{"type": "text", "text": content}]}


def _with_argument_text(message: JsonDict) -> JsonDict:
    """A turn with the arguments of its calls as JSON text, which some templates want."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}
        for call in message["tool_calls"]
        for arguments in [call["function"]["arguments"]]
    ]
    return {**message, "tool_calls": calls}
