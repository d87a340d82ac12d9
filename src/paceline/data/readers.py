"""Data files, cut into shards that can be read alone, and the rows of a shard.

JSON lines are cut at line ends by bytes, Parquet at row groups, Arrow at record batches, so that neither memory nor the
parts of a store depend on how many processes read. A folder is read as its `*.parquet`, `*.arrow` or `*.jsonl` files in
the order of their names, as `datasets` writes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from paceline.data.rows import RowRejected
from paceline.errors import DataError
from paceline.text import first_line

_BLOCK = 1 << 20
_SMALLEST_SHARD, _LARGEST_SHARD = 1 << 18, 1 << 23
_SHARDS = 64
"""A file is cut into about this many shards, within the sizes above (bytes)."""
_ROWS = 4096
"""Rows of a shard of a Parquet or Arrow file, about."""
_AT_ONCE = 256
"""Rows of a table that are Python objects at once."""
_KINDS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_BESIDE_DATA = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files that `datasets` writes beside the data."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file as it was named: path, how often its rows are shown an epoch, and tags of all its rows."""

    path: Path
    weight: float = 1.0
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowSource:
    """A data file that was read once: path, kind (`jsonl`, `parquet` or `arrow`), hash of its bytes, and as named."""

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
        path, kind: of the source.
        start, stop: bytes (`jsonl`), row groups (`parquet`) or record batches (`arrow`), stop exclusive.
        first_line: 1-based line (or row) at which it starts.
        tags: of all rows of the source.
    """

    number: int
    source: int
    path: str
    kind: str
    start: int
    stop: int
    first_line: int
    tags: tuple[str, ...] = ()


def find_files(names: Sequence[str], key: str = "data.train") -> list[DataFile]:
    """The data files that the names mean: folders opened, `hub:` names loaded, `#tag=..&weight=..` read.

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
            paths = _hub_files(bare, options) if bare.startswith("hub:") else _local_files(Path(bare))
            files += [DataFile(path, options["weight"], options["tags"]) for path in paths]
        except DataError as error:
            errors.append(f"{key}: {name}: {error}")
    if errors:
        raise DataError(*errors)
    return files


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


def _local_files(path: Path) -> list[Path]:
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            raise DataError("holds the splits of a data set, held-out ones among them; name the folder of one split")
        found = (file for file in path.rglob("*") if file.suffix in _KINDS and not _is_beside_data(file))
        inside = sorted(file for file in found if file.is_file())
        if not inside:
            raise DataError("no .jsonl, .parquet or .arrow file in this folder")
        return inside
    if not path.exists():
        raise DataError("no such file")
    if path.suffix not in _KINDS:
        raise DataError(f"unknown kind of file; allowed are {', '.join(_KINDS)}")
    if not path.stat().st_size:
        raise DataError("the file is empty; give a file with one chat a line")
    return [path]


def _hub_files(name: str, options: dict[str, Any]) -> list[Path]:
    """Arrow files of one split of a hub data set (or of a folder that `datasets` can load), loaded into its cache."""
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        loaded: Any = datasets.load_dataset(name.removeprefix("hub:"), split=options["split"])
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(f"cannot be loaded: {first_line(error)}") from error
    return [Path(file["filename"]) for file in loaded.cache_files]


def _is_beside_data(file: Path) -> bool:
    return file.name.startswith(("cache-", ".")) or file.name in _BESIDE_DATA


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
    total = sum(named.path.stat().st_size for named in files)
    done = 0
    sources: list[RowSource] = []
    shards: list[Shard] = []
    for place, named in enumerate(files):
        file, kind = named.path, _KINDS[named.path.suffix]
        digest, cuts = _scan_lines(file) if kind == "jsonl" else (_hash(file), _scan_table(file, kind))
        sources.append(RowSource(str(file), kind, digest, named.weight, named.tags))
        for start, stop, first in cuts:
            shards.append(Shard(len(shards), place, str(file), kind, start, stop, first, named.tags))
        done += file.stat().st_size
        if progress:
            progress(done, total)
    return sources, shards


def _scan_lines(file: Path) -> tuple[str, list[tuple[int, int, int]]]:
    size = file.stat().st_size
    aim = min(_LARGEST_SHARD, max(_SMALLEST_SHARD, size // _SHARDS))
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


def _scan_table(file: Path, kind: str) -> list[tuple[int, int, int]]:
    """Runs of row groups or record batches of about `_ROWS` rows."""
    try:
        counts = _parquet_counts(file) if kind == "parquet" else [batch.num_rows for batch in _arrow_batches(file)]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file}: cannot be read as {kind}: {first_line(error)}") from error
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
            yield f"{shard.path}:{line}", row


def read_shard(shard: Shard) -> Iterator[tuple[int, Any]]:
    """Line number and row of each row of a shard; a line that is not JSON gives a `RowRejected` in place of its row.

    Raises:
        DataError: rows of a table that cannot be read.
    """
    return _read_lines(shard) if shard.kind == "jsonl" else _read_table(shard)


def _read_lines(shard: Shard) -> Iterator[tuple[int, Any]]:
    line = shard.first_line - 1
    with Path(shard.path).open("rb") as stream:
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
                yield line, _decoded(text)


def _decoded(text: bytes | str) -> Any:
    """A value of JSON text; a `RowRejected` in its place where it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        head = text[:60] if isinstance(text, str) else text[:60].decode("utf-8", "replace")
        return RowRejected("invalid_json", f"{why}: {head.strip()}")


def _read_table(shard: Shard) -> Iterator[tuple[int, Any]]:
    line, batches = shard.first_line, _batches(shard)
    while True:
        try:
            batch = next(batches, None)
            rows = [] if batch is None else batch.to_pylist()
        except (OSError, pa.ArrowException, ValueError, OverflowError) as error:
            raise DataError(
                f"{shard.path}: row {line} and the rows after it cannot be read as {shard.kind}: {first_line(error)}; "
                "write the file again, without the column that is broken"
            ) from error
        if batch is None:
            return
        for row in rows:
            yield line, _without_nulls(row)
            line += 1


def _batches(shard: Shard) -> Iterator[pa.RecordBatch]:
    if shard.kind == "parquet":
        import pyarrow.parquet as pq

        groups = list(range(shard.start, shard.stop))
        yield from pq.ParquetFile(shard.path).iter_batches(batch_size=_AT_ONCE, row_groups=groups)
        return
    for number, batch in enumerate(_arrow_batches(Path(shard.path))):
        if number >= shard.stop:
            return
        if number >= shard.start:
            yield from (batch.slice(at, _AT_ONCE) for at in range(0, batch.num_rows, _AT_ONCE))


def _without_nulls(value: Any) -> Any:
    """Without the keys that are null, at every depth: Arrow gives every struct the fields of all rows, null where a row
    has none."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
