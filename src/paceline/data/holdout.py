"""Whole documents held out from training, chosen by a keyed hash: the order of rows and the reader do not matter."""

from __future__ import annotations

import hashlib
import shutil
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.data.dedup import prompt_of
from paceline.data.rows import Conversation, PlainText, Row, RowRejected, read_row, tags_of
from paceline.errors import DataError

HELDOUT = "heldout.jsonl"
"""File of the held-out rows in a store, as they were read, with the tags of their files."""
_KEY = b"paceline: held-out documents"


def document_of(values: Any, row: Row) -> bytes:
    """What a row's document is known by: its `document`, else the first question of a chat, else text or tokens."""
    named = values.get("document") if isinstance(values, Mapping) else None
    if named is not None:
        return b"document " + msgspec.json.encode(named, order="sorted")
    if isinstance(row, Conversation):
        return b"question " + prompt_of(row)
    if isinstance(row, PlainText):
        return b"text " + row.text.encode("utf-8", "surrogatepass")
    return b"tokens " + msgspec.json.encode(list(row.ids))


def is_held_out(document: bytes, share: float) -> bool:
    """Whether a document is among the `share` that is held out."""
    drawn = hashlib.blake2b(document, key=_KEY, digest_size=8).digest()
    return int.from_bytes(drawn, "little") < share * 2**64


def row_is_held_out(values: Any, share: float) -> bool:
    """Whether a row's document is held out; rows that cannot be read are not."""
    if not share or isinstance(values, RowRejected):
        return False
    try:
        return is_held_out(document_of(values, read_row(values)), share)
    except RowRejected:
        return False


def part_heldout(folder: Path, number: int) -> Path:
    """Where the held-out rows of one shard are written."""
    return folder / f"part-{number:06d}.heldout"


def write_heldout(rows: Sequence[Mapping[str, Any]], tags: tuple[str, ...], path: Path) -> None:
    """Held-out rows of one shard as JSON lines, each with the tags of its file before its own; no file for no rows."""
    if rows:
        tagged = ({**row, "tags": list(dict.fromkeys((*tags, *tags_of(row))))} if tags else row for row in rows)
        path.write_bytes(msgspec.json.Encoder().encode_lines(list(tagged)))


def join_heldout(parts: Path, store: Path, numbers: Sequence[int]) -> tuple[int, int]:
    """Join the held-out rows of all shards to one file of the store; rows and documents in it. No file for no rows."""
    found = [path for number in numbers if (path := part_heldout(parts, number)).exists()]
    documents = array("Q")
    if found:
        with (store / HELDOUT).open("wb") as joined:
            for path in found:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, joined)
        with (store / HELDOUT).open("rb") as joined:
            for line in joined:
                values = msgspec.json.decode(line)
                digest = hashlib.blake2b(document_of(values, read_row(values)), digest_size=8).digest()
                documents.append(int.from_bytes(digest, "little"))
    return len(documents), len(np.unique(np.asarray(documents)))


def heldout_files(named: Sequence[str], store: Path) -> list[str]:
    """Files of held-out chats: those named in the settings, else what was split off when the store was made."""
    if named:
        return list(named)
    split = store / HELDOUT
    return [str(split)] if split.is_file() else []


def unmeasurable(error: DataError) -> DataError:
    """The error of held-out files from which no sample can be made, as one of `data.heldout`."""
    lines = (line.replace("none can be trained on", "none can be measured") for line in error.errors)
    return DataError(
        *(
            f"data.heldout: {line}; name chats with answers, or set evaluate.validation_samples: 0 (prompts alone can "
            "be decoded)"
            for line in lines
        )
    )


def without_heldout(named: Sequence[str], store: Path) -> str | None:
    """A sentence where nothing is held out; None where something is."""
    if heldout_files(named, store):
        return None
    return (
        "no held-out data: nothing will show how the drafter does on text that it is not trained on, and `paceline "
        "evaluate` has no prompts; name other chats in data.heldout, or set data.heldout_share: 0.02 to hold out some"
    )
