"""Which tokens end an answer: one definition for loss masks, regeneration, every decode loop and export. No torch.

Servers stop at the tokenizer's own end token and at those that the target's files name. Where training took fewer of
them than decoding, or more, acceptance in training would not be that of a server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import TargetError
from paceline.text import first_line, parsed_json

_FILES = ("generation_config.json", "config.json")


def stop_token_ids(target: str, tokenizer_eos: int | None, num_tokens: int) -> tuple[int, ...]:
    """Ids that end an answer: the tokenizer's, then those of `generation_config.json`, then those of `config.json`.

    Args:
        target: folder or hub name of the target.
        tokenizer_eos: the end token of its tokenizer; None where it has none.
        num_tokens: ids are below this.

    Raises:
        TargetError: a file is not a JSON object, or its `eos_token_id` is not a token; one line.
    """
    found: list[int] = [] if tokenizer_eos is None else [tokenizer_eos]
    for name in _FILES:
        file = _file(target, name)
        if file is None:
            continue
        for item in _named(file):
            if type(item) is not int or not 0 <= item < num_tokens:
                raise TargetError(
                    f"{file}: eos_token_id holds {item!r}, which is not a token (0 to {num_tokens - 1}); repair the "
                    "file, or give the tokenizer that belongs to this target"
                )
            found.append(item)
    return tuple(dict.fromkeys(found))


def _file(target: str, name: str) -> Path | None:
    """A file of the target, fetched where the target is a hub name; None where it has no such file."""
    folder = Path(target).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils import cached_file

    found = cached_file(
        target,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def _named(file: Path) -> list[Any]:
    """What a file holds under `eos_token_id`, its text part's included."""
    try:
        written = parsed_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TargetError(f"{file}: not readable as JSON ({first_line(error)}); fetch the file again") from error
    if not isinstance(written, dict):
        raise TargetError(f"{file}: holds a {type(written).__name__} instead of an object; fetch the file again")
    found: list[Any] = []
    for part in (written, written.get("text_config")):
        item = part.get("eos_token_id") if isinstance(part, dict) else None
        found += item if isinstance(item, list) else [] if item is None else [item]
    return found
