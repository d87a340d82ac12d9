"""The data files that names mean: local files and folders, addresses (s3://, gs://, hf://, ...), data sets of the hub.

What is not a plain local file (compressed, or at an address) is copied to the cache first: `paceline` in the home of
Hugging Face (`HF_HOME`).
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import filelock
import msgspec

from paceline import atomic_files
from paceline.errors import DataError
from paceline.text import absent, first_line

_KINDS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_CONTENT = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow", b"{": "jsonl", b"[": "jsonl"}
"""First bytes, and the kind of a file without a known suffix."""
_COMPRESSED: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz")
_BETWEEN_VALUES, _JSON = re.compile(r"[\s,]*"), json.JSONDecoder()
_BESIDE_DATA = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files that `datasets` writes beside the data."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file.

    Attributes:
        name: as the user knows it.
        path: of its content on this machine, not compressed.
        kind: `jsonl`, `parquet` or `arrow`.
        weight: how often its rows are shown an epoch.
        tags: of all its rows.
    """

    name: str
    path: Path
    kind: str
    weight: float = 1.0
    tags: tuple[str, ...] = ()


def find_files(names: Sequence[str], key: str = "data.train") -> list[DataFile]:
    """The data files that the names mean: folders opened, others fetched, `#tag=..&weight=..` read.

    Raises:
        DataError: none given, missing, empty, or of an unknown kind; one line each.
    """
    if not names:
        raise DataError(f"{key}: no files given; list at least one JSONL or Parquet file")
    files: list[DataFile] = []
    errors: list[str] = []
    for name in names:
        try:
            bare, options = _options(name)
            if bare.startswith("hub:"):
                found = _hub_files(bare, options["split"])
            else:
                found = _remote_files(bare) if "://" in bare else _local_files(Path(bare))
            files += [replace(file, weight=options["weight"], tags=options["tags"]) for file in found]
        except DataError as error:
            errors.append(f"{key}: {name}: {error}")
        except (OSError, EOFError, lzma.LZMAError) as error:
            errors.append(f"{key}: {name}: cannot be read: {first_line(error)}")
    if errors:
        raise DataError(*errors)
    return files


def check_apart(train: Sequence[DataFile], heldout: Sequence[DataFile]) -> None:
    """Refuse a file that is to be trained on and held out.

    Raises:
        DataError: one line per file.
    """
    trained = {file.path.resolve() for file in train}
    errors = [
        f"data.heldout: {file.name} is in data.train too; what is trained on measures nothing: name a file of other "
        "chats, or drop data.heldout and set data.heldout_share: 0.02 to hold out some of data.train"
        for file in heldout
        if file.path.resolve() in trained
    ]
    if errors:
        raise DataError(*errors)


def _options(name: str) -> tuple[str, dict[str, Any]]:
    """Name without its options, and these: `weight`, `tags`, and `split` of a hub data set."""
    options: dict[str, Any] = {"weight": 1.0, "tags": (), "split": "train"}
    bare, mark, written = name.rpartition("#")
    if not mark or "=" not in written:
        return name, options
    for part in written.split("&"):
        key, _, value = part.partition("=")
        if key == "tag" and value:
            options["tags"] = (*options["tags"], value.replace(",", " "))
        elif key == "split" and value:
            options["split"] = value
        elif key == "weight":
            try:
                options["weight"] = float(value)
            except ValueError:
                options["weight"] = -1.0
            if not 0 < options["weight"] <= 1000:
                raise DataError(f"weight is {value!r}; it must be a number above 0 and at most 1000")
        else:
            raise DataError(f"{part!r} is not an option of a file; allowed are tag=WORD, weight=NUMBER and split=NAME")
    return bare, options


def _local_files(path: Path) -> list[DataFile]:
    if not path.exists():
        there = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, there, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise DataError(f"{absent(path, 'file')} (looked at {path.absolute()}){hint}")
    if not path.is_dir():
        return [_data_file(str(path), path)]
    if (path / "dataset_dict.json").is_file():
        raise DataError("holds the splits of a data set, held-out ones among them; name the folder of one split")
    inside = sorted(file for file in path.rglob("*") if _is_data(file.name) and file.is_file())
    if not inside:
        raise DataError("no .jsonl, .parquet or .arrow file in this folder")
    return [_data_file(str(file), file) for file in inside]


def _remote_files(address: str) -> list[DataFile]:
    """Files at an address, copied to the cache where they are not there yet: a file, a folder, or a pattern with *."""
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(address)
        if "*" in path:
            found = system.glob(path)
        else:
            found = system.find(path) if system.isdir(path) else [path]
        listed = [file for file in sorted(found) if file == path or _is_data(Path(file).name)]
        if not listed:
            raise DataError("no .jsonl, .parquet or .arrow file there")
        files: list[DataFile] = []
        for file in listed:
            # The system's own word for the content: an ETag, or size and time of the last change.
            copy = _cached(
                Path(file).name,
                f"{system.unstrip_protocol(file)} {system.ukey(file)}",
                lambda aside, file=file: system.get_file(file, str(aside)),
            )
            files.append(_data_file(system.unstrip_protocol(file), copy))
    except (ImportError, ValueError) as error:
        raise DataError(f"cannot be opened: {first_line(error)}") from error
    return files


def _hub_files(name: str, split: str) -> list[DataFile]:
    """Arrow files of one split of a hub data set (or of a folder that `datasets` can load), loaded into its cache."""
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        loaded: Any = datasets.load_dataset(name.removeprefix("hub:"), split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(f"cannot be loaded: {first_line(error)}") from error
    return [_data_file(file["filename"], Path(file["filename"])) for file in loaded.cache_files]


def _data_file(name: str, path: Path) -> DataFile:
    """A file whose content is at `path`, after its first bytes and its suffix."""
    head = _head(path)
    unpack = next((unpack for first, unpack in _COMPRESSED.items() if head.startswith(first)), None)
    if unpack is not None:
        packed = path
        path = _cached(_without_compression(path.name), _facts(path), lambda aside: _unpack(unpack, packed, aside))
        head = _head(path)
    if _has_values_over_lines(path, head):
        path = _cached(f"{path.stem}.jsonl", _facts(path), lambda aside, path=path: _write_lines(path, aside))
    if not path.stat().st_size:
        raise DataError("the file is empty; give a file with one chat a line")
    kind = _KINDS.get(Path(_without_compression(name)).suffix.lower())
    if kind is None:
        kind = next((kind for first, kind in _CONTENT.items() if head.startswith(first)), None)
    if kind is None:
        raise DataError(f"unknown kind of file; allowed are {', '.join(_KINDS)}, also as .gz, .bz2 or .xz")
    return DataFile(name, path, kind)


def _is_data(name: str) -> bool:
    beside = name.startswith(("cache-", ".")) or name in _BESIDE_DATA
    return not beside and Path(_without_compression(name)).suffix.lower() in _KINDS


def _without_compression(name: str) -> str:
    return name[: name.rindex(".")] if name.lower().endswith(_COMPRESSED_SUFFIXES) else name


def _head(path: Path) -> bytes:
    """The first bytes of a file, without a byte order mark and white space."""
    with path.open("rb") as stream:
        return stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()


def _unpack(unpack: Callable[[Path], Any], packed: Path, into: Path) -> None:
    with unpack(packed) as source, into.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)


def _has_values_over_lines(path: Path, head: bytes) -> bool:
    """Whether a file is one JSON array, or begins with an object over several lines."""
    if head.startswith(b"["):
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 64))
            return stream.read().rstrip().endswith(b"]")
    return head.split(b"\n")[0].rstrip() == b"{"


def _write_lines(path: Path, into: Path) -> None:
    """Write the values of such a file one a line, NaN and infinities as null; all of it is in memory.

    Raises:
        DataError: it is not JSON.
    """
    text = path.read_text("utf-8-sig").strip()
    at, end = (1, len(text) - 1) if text.startswith("[") else (0, len(text))
    try:
        with into.open("wb") as sink:
            while (at := _between_values(text, at)) < end:
                value, at = _JSON.raw_decode(text, at)
                sink.write(msgspec.json.encode(value) + b"\n")
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else first_line(error)
        line = text.count("\n", 0, at) + 1
        raise DataError(f"the value that begins in line {line} is not JSON: {why}; write one chat a line") from error


def _between_values(text: str, at: int) -> int:
    found = _BETWEEN_VALUES.match(text, at)
    return found.end() if found else at


def _facts(path: Path) -> str:
    """What a file was when it was copied."""
    found = path.stat()
    return f"{path.resolve()} {found.st_size} {found.st_mtime_ns}"


def _cached(name: str, content: str, make: Callable[[Path], None]) -> Path:
    """The file of this name and content in the cache; made where it is not there."""
    from huggingface_hub.constants import HF_HOME

    path = Path(HF_HOME) / "paceline" / hashlib.blake2b(content.encode(), digest_size=16).hexdigest() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.parent / ".lock"):
        if not path.exists():
            with atomic_files.replacing(path) as aside:
                make(aside)
    return path
