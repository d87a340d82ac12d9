"""Data files, cut into shards that can be read alone, and the rows of a shard.

JSON lines are cut at line ends by bytes, Parquet at row groups, Arrow at record batches, so that neither memory nor the
parts of a store depend on how many processes read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from paceline.data.files import DataFile, find_files
from paceline.data.rows import RowRejected
from paceline.errors import DataError
from paceline.text import TOO_DEEP, check_depth, first_line

_BLOCK = 1 << 20
_SMALLEST_SHARD, _LARGEST_SHARD = 1 << 18, 1 << 23
_SHARDS = 64
"""A file is cut into about this many shards, within the sizes above (bytes)."""
_ROWS = 4096
"""Rows of a shard of a Parquet or Arrow file, about."""
_AT_ONCE = 256
"""Rows of a table that are Python objects at once."""


@dataclass(frozen=True, slots=True)
class RowSource:
    """A data file that was read once: its name, kind, hash of its bytes, and weight and tags of its rows."""

    path: str
    kind: str
    digest: str
    weight: float = 1.0
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """A stretch of a source.

    Attributes:
        number: place among all shards.
        source: place of its source.
        name: of the source, for messages.
        path: where its content is.
        kind: of the source.
        start, stop: bytes (`jsonl`), row groups (`parquet`) or record batches (`arrow`), stop exclusive.
        first_line: 1-based line (or row) at which it starts.
        tags: of all rows of the source.
    """

    number: int
    source: int
    name: str
    path: Path
    kind: str
    start: int
    stop: int
    first_line: int
    tags: tuple[str, ...] = ()


def scan(
    files: Sequence[DataFile], progress: Callable[[int, int], None] | None = None
) -> tuple[list[RowSource], list[Shard]]:
    """Hash every file and cut it into shards, in one reading of each.

    Args:
        files: from `find_files`.
        progress: called with bytes done and bytes in all.

    Raises:
        DataError: a file that cannot be read as its kind.
    """
    total = sum(file.path.stat().st_size for file in files)
    done = 0
    sources: list[RowSource] = []
    shards: list[Shard] = []
    for place, file in enumerate(files):
        lines = file.kind == "jsonl"
        digest, cuts = _scan_lines(file.path) if lines else (_hash(file.path), _scan_table(file))
        sources.append(RowSource(file.name, file.kind, digest, file.weight, file.tags))
        for start, stop, first in cuts:
            shards.append(Shard(len(shards), place, file.name, file.path, file.kind, start, stop, first, file.tags))
        done += file.path.stat().st_size
        if progress:
            progress(done, total)
    return sources, shards


def _scan_lines(file: Path) -> tuple[str, list[tuple[int, int, int]]]:
    aim = min(_LARGEST_SHARD, max(_SMALLEST_SHARD, file.stat().st_size // _SHARDS))
    digest = hashlib.blake2b(digest_size=16)
    cuts: list[tuple[int, int, int]] = []
    start, first, line, offset = 0, 1, 1, 0
    with file.open("rb") as stream:
        while block := stream.read(min(_BLOCK, aim)):
            digest.update(block)
            last = block.rfind(b"\n")
            if last >= 0 and offset + last + 1 - start >= aim:
                cuts.append((start, offset + last + 1, first))
                start, first = offset + last + 1, line + block.count(b"\n", 0, last + 1)
            line += block.count(b"\n")
            offset += len(block)
    if start < offset:
        cuts.append((start, offset, first))
    return digest.hexdigest(), cuts


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _scan_table(file: DataFile) -> list[tuple[int, int, int]]:
    """Runs of row groups or record batches of about `_ROWS` rows."""
    try:
        if file.kind == "parquet":
            counts = _parquet_counts(file.path)
        else:
            counts = [batch.num_rows for batch in _arrow_batches(file.path)]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file.name}: cannot be read as {file.kind}: {first_line(error)}") from error
    cuts: list[tuple[int, int, int]] = []
    start, held, first = 0, 0, 1
    for place, count in enumerate(counts):
        held += count
        if held >= _ROWS or place == len(counts) - 1:
            cuts.append((start, place + 1, first))
            start, first, held = place + 1, first + held, 0
    return cuts


def _parquet_counts(file: Path) -> list[int]:
    import pyarrow.parquet as pq

    facts = pq.ParquetFile(file).metadata
    return [facts.row_group(number).num_rows for number in range(facts.num_row_groups)]


def _arrow_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Record batches of an Arrow file or stream (`datasets` writes streams), memory-mapped."""
    mapped = pa.memory_map(str(file))
    try:
        opened = pa.ipc.open_file(mapped)
    except pa.ArrowInvalid:
        yield from pa.ipc.open_stream(mapped)
        return
    for number in range(opened.num_record_batches):
        yield opened.get_batch(number)


def read_rows(names: Sequence[str], key: str) -> Iterator[tuple[str, Any]]:
    """`file:line` and row of every row of some files, one after another."""
    _, shards = scan(find_files(names, key))
    for shard in shards:
        for line, row in read_shard(shard):
            yield f"{shard.name}:{line}", row


def read_shard(shard: Shard) -> Iterator[tuple[int, Any]]:
    """Line number and row of each row of a shard; a `RowRejected` in place of a row that cannot be read.

    Raises:
        DataError: a table that cannot be read any further.
    """
    return _read_lines(shard) if shard.kind == "jsonl" else _read_table(shard)


def _read_lines(shard: Shard) -> Iterator[tuple[int, Any]]:
    line = shard.first_line - 1
    with shard.path.open("rb") as stream:
        stream.seek(shard.start)
        left = shard.stop - shard.start
        for text in stream:
            if left <= 0:
                return
            left -= len(text)
            line += 1
            if line == 1:
                text = text.removeprefix(b"\xef\xbb\xbf")
            if text.strip():
                yield line, _value(text)


def _value(text: bytes) -> Any:
    """A value of JSON text, NaN and infinities as null; a `RowRejected` in its place where it is not JSON."""
    try:
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError:
            if b"NaN" not in text and b"Infinity" not in text:
                raise
            value = msgspec.json.decode(msgspec.json.encode(json.loads(text)))
        check_depth(text, value)
        return value
    except (ValueError, RecursionError) as error:
        why = TOO_DEEP if isinstance(error, RecursionError) else first_line(error)
        return RowRejected("invalid_json", f"{why}: {text[:60].decode('utf-8', 'replace').strip()}")


def _read_table(shard: Shard) -> Iterator[tuple[int, Any]]:
    line, batches = shard.first_line, _batches(shard)
    while True:
        try:
            batch = next(batches, None)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{shard.name}: row {line} and the rows after it cannot be read as {shard.kind}: {first_line(error)}; "
                "write the file again"
            ) from error
        if batch is None:
            return
        for row in _rows(batch):
            yield line, row
            line += 1


def _batches(shard: Shard) -> Iterator[pa.RecordBatch]:
    if shard.kind == "parquet":
        import pyarrow.parquet as pq

        groups = list(range(shard.start, shard.stop))
        yield from pq.ParquetFile(shard.path).iter_batches(batch_size=_AT_ONCE, row_groups=groups)
        return
    for number, batch in enumerate(_arrow_batches(shard.path)):
        if number >= shard.stop:
            return
        if number >= shard.start:
            yield from (batch.slice(at, _AT_ONCE) for at in range(0, batch.num_rows, _AT_ONCE))


def _rows(batch: pa.RecordBatch) -> Iterator[Any]:
    """Rows of a table as JSON lines would have them; a `RowRejected` in place of one that cannot be read."""
    plain = _reader(pa.struct(list(batch.schema)))
    try:
        values = batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        values = [None] * batch.num_rows
    for number, value in enumerate(values):
        try:
            yield plain(value if value is not None else _row_alone(batch.slice(number, 1)))
        except RowRejected as rejected:
            yield rejected


def _row_alone(row: pa.RecordBatch) -> Any:
    found = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            found[name] = column[0].as_py()
        except (ValueError, OverflowError, pa.ArrowException) as error:
            raise RowRejected("unreadable", f"column {name}: {first_line(error)}") from error
    return found


def _reader(kind: pa.DataType) -> Callable[[Any], Any]:
    """How a value of an Arrow type is read, at every depth.

    A struct has the fields of all rows, null where a row has none: those are left out. `datasets` keeps values whose
    type differs from row to row as JSON text (`arrow.json`): they are decoded, nulls in them stay.

    Raises:
        RowRejected: by what is returned, for text that is not JSON.
    """
    if isinstance(kind, pa.JsonType):
        return _json
    if pa.types.is_struct(kind):
        readers = {field.name: _reader(field.type) for field in kind}
        return lambda value: value and {key: readers[key](item) for key, item in value.items() if item is not None}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item_of = _reader(kind.value_type)
        return lambda value: value and [item_of(item) for item in value]
    return lambda value: value


def _json(text: str | None) -> Any:
    value = None if text is None else _value(text.encode())
    if isinstance(value, RowRejected):
        raise value
    return value
