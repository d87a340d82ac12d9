"""What reaches a terminal: control characters that data brings in are shown instead of sent.

An escape sequence in a chat, a file's name or a server's answer could otherwise change the title, the colors or earlier
lines of the terminal. Codes such as ``:x:`` are not replaced by pictures; a string is markup only where a command says
so and has escaped what comes from outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls but tab and newline, marks that turn the direction of text around, and bytes of names that are not text."""


def visible(text: str) -> str:
    """The text with control characters as escapes: ESC becomes the four characters ``\\x1b``."""
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


class PlainConsole(Console):
    """A console that nothing can write control characters to but its own styles."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, emoji=False, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As in rich, with the text of every segment made visible."""
        for segment in super().render(renderable, options):
            if segment.control or not _UNSAFE.search(segment.text):
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
