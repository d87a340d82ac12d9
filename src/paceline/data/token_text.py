"""The text that each token of an answer adds, as it is shown while the answer grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TokenText:
    """Turns tokens into text one by one; the bytes of a character that spans tokens come with the last of them.

    Args:
        tokenizer: of the target.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Spaces depend on the token before, so each token is decoded behind the piece that came before it.
        self._before, self._begun = 0, 0

    def add(self, token: int) -> str:
        """The text that a token adds; "" where its character is not complete."""
        self._ids.append(token)
        whole = self._text(len(self._ids))
        return "" if whole.endswith("\ufffd") else self._piece(whole)

    def rest(self) -> str:
        """What is left of an answer that ends inside a character; "" where nothing is."""
        return self._piece(self._text(len(self._ids))) if self._begun < len(self._ids) else ""

    def _piece(self, whole: str) -> str:
        piece = whole[len(self._text(self._begun)) :]
        self._before, self._begun = self._begun, len(self._ids)
        return piece

    def _text(self, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[self._before : end], skip_special_tokens=False))


def text_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds."""
    text = TokenText(tokenizer)
    pieces = [text.add(token) for token in ids]
    if pieces:
        pieces[-1] += text.rest()
    return pieces
