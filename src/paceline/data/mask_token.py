"""The token of the draft slots: asked for by id or by text, the tokenizer's own mask token, or a spare one."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from paceline.data.tokenizer import chat_template
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPARE = re.compile(r"reserved|unused|extra_id|placeholder|dummy|special_\d|control_\d", re.IGNORECASE)
"""Names that makers of tokenizers give to tokens without a use."""


@dataclass(frozen=True, slots=True)
class MaskToken:
    """A mask token.

    Attributes:
        id: of the token.
        text: of the token; empty for a row of the embedding that the tokenizer does not use.
        note: a sentence where neither the settings nor the tokenizer name it; else empty.
    """

    id: int
    text: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.id} ({self.text})" if self.text else f"{self.id} (beyond the tokenizer's tokens)"


def choose_mask_token(
    tokenizer: PreTrainedTokenizerBase,
    asked: int | str | None,
    vocab_size: int | None = None,
    taken: Collection[int] = (),
) -> MaskToken | None:
    """The mask token of a run.

    Args:
        tokenizer: of the target.
        asked: `drafter.mask_token_id`.
        vocab_size: rows of the target's embedding; None where that is not known.
        taken: tokens that the target's configuration gives a meaning.

    Returns:
        None only where nothing is asked for, the tokenizer names no spare token, and `vocab_size` is not known.

    Raises:
        ConfigError: what is asked for cannot be used, or there is no spare token; one line.
    """
    known = tokenizer.get_vocab()
    if asked is None and tokenizer.mask_token_id is not None:
        asked = int(tokenizer.mask_token_id)
    if asked is not None:
        token = known.get(asked) if isinstance(asked, str) else asked
        if token is None:
            near = get_close_matches(str(asked), [*tokenizer.get_added_vocab(), *known], n=1)
            hint = f"did you mean {near[0]}?" if near else "give a token of the tokenizer, or an id"
            raise ConfigError(f"drafter.mask_token_id = {asked}: the tokenizer has no such token; {hint}")
        wrong = _why_not(tokenizer, token, vocab_size)
        if wrong:
            example = _example(tokenizer, spare_token(tokenizer, vocab_size, taken))
            raise ConfigError(f"drafter.mask_token_id = {asked}: {wrong}; {example}")
        return MaskToken(token, _text_of(tokenizer, token))
    spare = spare_token(tokenizer, vocab_size, taken)
    if spare is not None:
        note = (
            f"drafter.mask_token_id: unset, and the tokenizer has no mask token; its spare token {spare} is used: set "
            "drafter.mask_token_id to have another"
        )
        return MaskToken(spare.id, spare.text, note)
    if vocab_size is None:
        return None
    raise ConfigError(
        "drafter.mask_token_id: unset, and the tokenizer has no mask token and no spare one; give the id of a token "
        f"that does not occur in the text (0 to {vocab_size - 1})"
    )


def spare_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, taken: Collection[int]) -> MaskToken | None:
    """A token without a use: the first that is named so, else the first row of the embedding behind the tokenizer's."""
    template = chat_template(tokenizer) or ""
    for text, token in sorted(tokenizer.get_added_vocab().items(), key=lambda item: item[1]):
        free = token not in taken and text not in template and not _why_not(tokenizer, token, vocab_size)
        if free and _SPARE.search(text):
            return MaskToken(token, text)
    behind = max(tokenizer.get_vocab().values(), default=-1) + 1
    return MaskToken(behind, "") if vocab_size is not None and behind < vocab_size else None


def _why_not(tokenizer: PreTrainedTokenizerBase, token: int, vocab_size: int | None) -> str:
    """Why a token cannot be the mask token; empty where it can."""
    if token < 0 or (vocab_size is not None and token >= vocab_size):
        allowed = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
        return f"outside the target's embedding; allowed: {allowed}"
    roles = ("eos", "bos", "pad", "unk")
    taken = [role for role in roles if getattr(tokenizer, f"{role}_token_id") == token]
    return f"is the tokenizer's {' and '.join(taken)} token, which means something else to the target" if taken else ""


def _example(tokenizer: PreTrainedTokenizerBase, spare: MaskToken | None) -> str:
    if tokenizer.mask_token_id is not None:
        return f"leave it unset: the tokenizer has {tokenizer.mask_token}"
    return f"for example drafter.mask_token_id: {spare}" if spare is not None else "give an id without a use"


def _text_of(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    found = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    return found if isinstance(found, str) else ""
