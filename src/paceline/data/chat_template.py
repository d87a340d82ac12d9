"""Conversations as the target's own chat template writes them, and text as its tokenizer reads it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.data.rows import Conversation, RowRejected
from paceline.data.tokenizer import chat_template, end_token_ids
from paceline.errors import DataError
from paceline.types import JsonDict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHORT = 64
"""Pieces of at most this many characters are remembered for the life of the encoder (turn headers, line ends)."""


class Renderer:
    """Renders conversations with one tokenizer's chat template, as `apply_chat_template` does.

    Args:
        tokenizer: of the target.
        thinking: `on` and `off` set the template's `enable_thinking`; `auto` lets each answer show which generation
            prompt it continues. A row's own template variables win.

    Raises:
        DataError: the tokenizer has no chat template, or one that is no valid Jinja.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: str = "auto") -> None:
        template = chat_template(tokenizer)
        if template is None:
            raise DataError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template, so chats cannot be rendered as they "
                "will be served; give a target with one, or data in `text` or `input_ids` form"
            )
        self._template = template
        self._tool_template = chat_template(tokenizer, tools=True) or template
        self._special = dict(tokenizer.special_tokens_map)
        self._thinking = thinking
        self.has_generation_tags = _GENERATION_TAG.search(template) is not None
        self.has_thinking_switch = "enable_thinking" in template
        self.writes_the_date = "strftime_now" in template
        self.has_generation_prompt = self._tried(tokenizer.name_or_path)

    def variables(self, conversation: Conversation) -> list[Mapping[str, Any]]:
        """Variables of the generation prompts that a server may have used, the likeliest first."""
        given = dict(conversation.template)
        if not self.has_thinking_switch or "enable_thinking" in given:
            return [given]
        if self._thinking != "auto":
            return [{**given, "enable_thinking": self._thinking == "on"}]
        return [given, {**given, "enable_thinking": False}, {**given, "enable_thinking": True}]

    def _tried(self, name: str) -> bool:
        """Render a question with every template; whether the generation prompt makes a difference."""
        from jinja2.exceptions import TemplateSyntaxError

        question = [{"role": "user", "content": "?"}]
        found = True
        try:
            for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
                chat = Conversation(question, tools)
                texts = [self.texts(chat, [1], {}, generation=generation) for generation in (True, False)]
                found = found and (tools is not None or texts[0] != texts[1])
        except RowRejected as refused:
            if isinstance(error := refused.__cause__, TemplateSyntaxError):
                raise DataError(f"{name}: line {error.lineno} of its chat template is broken: {error}") from error
            return "add_generation_prompt" in self._template
        return found

    def texts(
        self, conversation: Conversation, ends: Sequence[int], variables: Mapping[str, Any], *, generation: bool
    ) -> list[str]:
        """The conversation up to each of `ends` (turns, exclusive), with or without the generation prompt.

        Raises:
            SetAside: the template refuses the conversation (`template_refuses`).
        """
        return self._render(conversation, ends, variables, generation=generation, spans=False)[0]

    def tagged(
        self, conversation: Conversation, end: int, variables: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Text of the first `end` turns, and the character spans that the template's generation tags enclose."""
        texts, spans = self._render(conversation, [end], variables, generation=False, spans=True)
        return texts[0], spans[0]

    def _render(
        self,
        conversation: Conversation,
        ends: Sequence[int],
        variables: Mapping[str, Any],
        *,
        generation: bool,
        spans: bool,
    ) -> tuple[list[str], list[list[tuple[int, int]]]]:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        chats: list[list[JsonDict]] = [conversation.messages[:end] for end in ends]
        try:
            # Typed as one string upstream; it is a list for a list of chats, and so are the spans.
            render: Any = render_jinja_template
            texts, indices = render(
                conversations=chats,
                tools=conversation.tools,
                chat_template=self._tool_template if conversation.tools else self._template,
                add_generation_prompt=generation,
                return_assistant_tokens_mask=spans,
                **{**self._special, **variables},
            )
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
        return texts, indices


class Encoder:
    """Text to ids exactly as the tokenizer reads the whole text, remembering pieces.

    A token that is special and takes no white space before it cuts the text: each such token is read with what
    follows it, up to the next one. Pieces are remembered by their text, so that rendering one conversation up to each
    of its turns costs one reading. Whether the tokenizer really reads piece by piece is tried on probes when the
    encoder is made; where it does not, whole texts are read.

    Args:
        tokenizer: of the target.
        probes: texts; joined by the tokens that cut, they must read the same by pieces and whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, probes: Iterable[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_token_ids(tokenizer))
        added = tokenizer.added_tokens_decoder
        cutters = {
            token.content: index
            for index, token in added.items()
            if token.special and not (token.lstrip or token.single_word or token.normalized)
        }
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._cutters = cutters
        longest_first = sorted(cutters, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, longest_first))) if cutters else None
        ends = [str(tokenizer.convert_ids_to_tokens(index)) for index in sorted(self.end_ids)]
        specials = [token.content for token in added.values() if token.special]
        self.end_pattern = re.compile("|".join(map(re.escape, ends))) if ends else None
        self.special_pattern = (
            re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True)))) if specials else None
        )
        # The Rust tokenizer without offsets is 1.6 times as fast as through the wrapper (1.2 against 0.75 M tokens/s).
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._remembered: dict[str, list[int]] = {}
        joined = [cutter + probe for probe in probes for cutter in list(cutters)[:8]]
        tried = ["".join(joined), *probes]
        self.by_pieces = self._cut is not None and all(self.pieces(text) == self.whole(text) for text in tried)

    def whole(self, text: str) -> list[int]:
        """Ids of the text read in one go."""
        if self._backend is None:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def pieces(self, text: str, memory: dict[str, list[int]] | None = None) -> list[int]:
        """Ids of the text read piece by piece; `memory` keeps the pieces of one conversation."""
        assert self._cut is not None
        memory = {} if memory is None else memory
        starts = [0, *(match.start() for match in self._cut.finditer(text)), len(text)]
        ids: list[int] = []
        for start, end in itertools.pairwise(starts):
            piece = text[start:end]
            if not piece:
                continue
            found = self._remembered.get(piece) or memory.get(piece)
            if found is None:
                found = self.whole(piece)
                (self._remembered if len(piece) <= _SHORT and len(self._remembered) < 4096 else memory)[piece] = found
            ids += found
        return ids

    def continued(self, text: str, ids: list[int], more: str, memory: dict[str, list[int]] | None = None) -> list[int]:
        """Ids of `text + more`, equal to `whole`; of `text`, read as `ids`, only the last piece is read again."""
        if not self.by_pieces or self._cut is None:
            return self.whole(text + more)
        last = max((match.start() for match in self._cut.finditer(text)), default=0)
        kept = len(ids) - len(self.pieces(text[last:], memory))
        return ids[:kept] + self.pieces(text[last:] + more, memory)

    def encode(self, text: str, memory: dict[str, list[int]] | None = None) -> list[int]:
        """Ids of the text, equal to `whole`."""
        return self.pieces(text, memory) if self.by_pieces else self.whole(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, nothing left out or tidied."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
