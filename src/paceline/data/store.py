"""The tokenized store: Arrow parts with the tokens, an index with lengths and anchor counts, a manifest.

    STORE/manifest.json      what it was made from, and the report
    STORE/index.arrow        one row a sample: part, row in the part, length, eligible, supervised, source, line, tags
    STORE/used_ids.npy       token ids that occur in the text, int32, ascending
    STORE/heldout.jsonl      rows of held-out documents, where `data.heldout_share` asks for some
    STORE/part-000000.arrow  input_ids and loss_mask (flat start and end of the supervised spans) of some samples

Everything is memory-mapped; opening reads the index's columns only. Sample ids are row numbers of the index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from paceline import atomic_files
from paceline.data.readers import RowSource
from paceline.data.report import PrepareReport
from paceline.errors import DataError
from paceline.text import absent, first_line
from paceline.types import JsonDict

FORMAT = 1
MANIFEST, INDEX, USED_IDS = "manifest.json", "index.arrow", "used_ids.npy"

PART_SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.int32())),
    ]
)
INDEX_SCHEMA = pa.schema(
    [
        pa.field("part", pa.int32()),
        pa.field("row", pa.int32()),
        pa.field("length", pa.int64()),
        pa.field("eligible", pa.int64()),
        pa.field("supervised", pa.int32()),
        pa.field("source", pa.int32()),
        pa.field("line", pa.int64()),
        pa.field("tags", pa.dictionary(pa.int32(), pa.string())),
    ]
)


def part_name(number: int) -> str:
    """File name of a part."""
    return f"part-{number:06d}.arrow"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a store was made from, and how that went.

    Attributes:
        format: of the store's files, `FORMAT`.
        fingerprint: hash of `ingredients`.
        ingredients: hashes of rows, tokenizer and template, and the settings that decide the content.
        sources: data files, in the order of the index's `source`.
        files: hash of the bytes of each other file of the store.
        report: of preparing.
        target: identity of the target whose answers these are, part by part; empty where it was not known.
        words: sentences for the reasons and notes in the report.
        use: what the settings of a run make of it (`coverage.StoreUse`).
    """

    format: int
    fingerprint: str
    ingredients: JsonDict
    sources: list[RowSource]
    files: dict[str, str]
    report: PrepareReport
    target: dict[str, str] = field(default_factory=dict)
    words: dict[str, dict[str, str]] = field(default_factory=dict)
    use: JsonDict | None = None


def read_table(path: Path) -> pa.Table:
    """An Arrow file, memory-mapped.

    Raises:
        DataError: missing or broken.
    """
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise _broken(path, first_line(error)) from error


def write_table(table: pa.Table, path: Path) -> None:
    """Write an Arrow file that appears whole, as one record batch."""
    with (
        atomic_files.replacing(path) as aside,
        pa.OSFile(str(aside), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table.combine_chunks(), max_chunksize=max(1, table.num_rows))


def file_hash(path: Path) -> str:
    """Hash of a file's bytes, for damage that nobody meant: XXH3, as fast as they are read (blake2b: 0.6 GB/s)."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def _broken(path: Path, why: str) -> DataError:
    return DataError(f"{path}: cannot be read ({why}); remove the store and run `paceline prepare` again")


class Part:
    """One part of a store, memory-mapped.

    Args:
        path: its file.

    Raises:
        DataError: missing or broken.
    """

    def __init__(self, path: Path) -> None:
        table = read_table(path)
        self._ids, self._id_offsets = _list_column(table, "input_ids")
        self._spans, self._span_offsets = _list_column(table, "loss_mask")

    def ids(self, row: int) -> np.ndarray:
        """Token ids of a row, int32 [length], not copied."""
        return self._ids[self._id_offsets[row] : self._id_offsets[row + 1]]

    def mask(self, row: int) -> np.ndarray:
        """Loss mask of a row, bool [length]."""
        mask = np.zeros(self._id_offsets[row + 1] - self._id_offsets[row], dtype=bool)
        spans = self._spans[self._span_offsets[row] : self._span_offsets[row + 1]].tolist()
        for start, end in zip(spans[::2], spans[1::2], strict=True):
            mask[start:end] = True
        return mask


class TokenStore:
    """A sample source over a store folder (see `types.SampleSource`).

    Args:
        path: the folder.
        manifest: its manifest.
        index: its index table.
        verify: compare each file with its hash before it is read for the first time.
    """

    def __init__(self, path: Path, manifest: Manifest, index: pa.Table, verify: bool) -> None:
        self.path = path
        self.manifest = manifest
        self.fingerprint: str = manifest.fingerprint
        self._index = index
        self._part = _column(index, "part")
        self._row = _column(index, "row")
        self._lengths = _column(index, "length")
        self._eligible = _column(index, "eligible")
        self._parts: dict[int, Part] = {}
        self._unverified = set(manifest.files) if verify else set[str]()

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sample, int64 [num_samples]."""
        return self._lengths

    @property
    def eligible(self) -> np.ndarray:
        """Eligible anchor positions per sample, int64 [num_samples]."""
        return self._eligible

    @property
    def supervised(self) -> np.ndarray:
        """Supervised tokens per sample, int32 [num_samples]."""
        return _column(self._index, "supervised")

    @cached_property
    def used_ids(self) -> np.ndarray:
        """Token ids that occur in the text, int32, ascending.

        Raises:
            DataError: missing or broken.
        """
        try:
            return np.load(self.path / USED_IDS)
        except (OSError, ValueError, EOFError) as error:
            raise _broken(self.path / USED_IDS, first_line(error)) from error

    def tags(self, row: int) -> tuple[str, ...]:
        """Tags of one sample."""
        text = self._index["tags"][int(row)].as_py()
        return tuple(text.split(",")) if text else ()

    def names(self) -> list[list[str]]:
        """Tags and source file of every sample, by which `plan.weights` may name it."""
        sources = [source.path for source in self.manifest.sources]
        rows = zip(self._index["tags"].to_pylist(), self._index["source"].to_pylist(), strict=True)
        return [[*(tags.split(",") if tags else []), sources[source]] for tags, source in rows]

    def origin(self, row: int) -> str:
        """`file:line` that one sample was made from."""
        source = self.manifest.sources[self._index["source"][int(row)].as_py()]
        return f"{source.path}:{self._index['line'][int(row)].as_py()}"

    def read(self, rows: Sequence[int] | np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids (int64 [length]) and loss mask (bool [length]) of each row, in the order asked for.

        Raises:
            DataError: a row that the store does not have, or a file that is not as it was written.
        """
        self._verify(INDEX)
        asked = np.asarray(rows, dtype=np.int64)
        if len(asked) and (asked.min() < 0 or asked.max() >= len(self)):
            raise DataError(f"{self.path}: rows {asked.min()} to {asked.max()} asked of {len(self)}")
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for number, row in zip(self._part[asked].tolist(), self._row[asked].tolist(), strict=True):
            part = self._parts.get(number)
            if part is None:
                self._verify(part_name(number))
                part = self._parts[number] = Part(self.path / part_name(number))
            found.append((part.ids(row).astype(np.int64), part.mask(row)))
        return found

    def _verify(self, name: str) -> None:
        if name not in self._unverified:
            return
        try:
            found = file_hash(self.path / name)
        except OSError as error:
            raise _broken(self.path / name, first_line(error)) from error
        if found != self.manifest.files[name]:
            raise DataError(
                f"{self.path / name}: damaged: its bytes are not those that were written; remove the store and run "
                "`paceline prepare` again"
            )
        self._unverified.remove(name)


def open_store(path: str | Path, *, verify: bool = True) -> TokenStore:
    """A store for reading.

    Args:
        path: its folder.
        verify: see `TokenStore`.

    Raises:
        DataError: no store there, an unfinished one, another format, or a broken file.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    return TokenStore(folder, manifest, read_table(folder / INDEX), verify)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a store.

    Raises:
        DataError: no store there, another format, or broken.
    """
    file = folder / MANIFEST
    try:
        values: Any = msgspec.json.decode(file.read_bytes())
        found = values.get("format") if isinstance(values, dict) else None
        if found != FORMAT:
            raise DataError(f"{file}: store format {found}, this paceline reads {FORMAT}; prepare the data again")
        return msgspec.convert(values, Manifest)
    except FileNotFoundError:
        if folder.is_symlink() and not folder.exists():
            raise DataError(f"{folder}: {absent(folder, 'store')}; make that folder, or remove the link") from None
        raise DataError(f"{folder}: no tokenized store here; run `paceline prepare` first") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(file, first_line(error)) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a store; it appears whole."""
    atomic_files.write_text(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2).decode())


def _column(table: pa.Table, name: str) -> np.ndarray:
    column = table[name].combine_chunks()
    chunk = column if isinstance(column, pa.Array) else column.chunk(0)
    return chunk.to_numpy(zero_copy_only=True)


def _list_column(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and offsets of a list column without copies."""
    chunk = table[name].chunk(0)
    return chunk.values.to_numpy(zero_copy_only=True), chunk.offsets.to_numpy(zero_copy_only=True)
