"""What is known of each sample beside its tokens: written part by part, gathered to the store's index, and summed up.

While a store is made, `part-000000.columns` holds these columns of one part, with a hash and a signature of the tokens.
Parts are looked at one at a time and gathered in files, so that memory does not grow with the number of samples.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from paceline.data.dedup import SIGNATURE, content_hash, signature
from paceline.data.loss_mask import Sample
from paceline.data.report import TagTotals
from paceline.data.store import INDEX, INDEX_SCHEMA, PART_SCHEMA, part_name, read_table, write_table

_NUMBERS = {"length": "q", "eligible": "q", "supervised": "i", "source": "i", "line": "q", "content_hash": "Q"}
"""Columns of one number a sample, and its type."""


def columns_path(folder: Path, number: int) -> Path:
    """Where the columns of one part are while a store is made."""
    return folder / f"part-{number:06d}.columns"


class PartWriter:
    """Samples of one part, packed: about 300 bytes beside the tokens of each."""

    def __init__(self) -> None:
        self._ids, self._id_ends = array("i"), array("i", [0])
        self._spans, self._span_ends = array("i"), array("i", [0])
        self._numbers = {name: array(code) for name, code in _NUMBERS.items()}
        self._signatures = array("I")
        self._tags: list[str] = []
        self._known: dict[str, str] = {}

    def append(self, sample: Sample, eligible: int, source: int, line: int) -> None:
        """Add a sample with its eligible anchors and origin."""
        self._ids.frombytes(sample.ids.tobytes())
        self._id_ends.append(len(self._ids))
        self._spans.frombytes(sample.spans.tobytes())
        self._span_ends.append(len(self._spans))
        self._signatures.frombytes(signature(sample.ids).tobytes())
        tags = ",".join(sample.tags)
        self._tags.append(self._known.setdefault(tags, tags))
        supervised = int((sample.spans[1::2] - sample.spans[::2]).sum())
        values = (len(sample.ids), eligible, supervised, source, line, content_hash(sample.ids))
        for column, value in zip(self._numbers.values(), values, strict=True):
            column.append(value)

    def write(self, folder: Path, store: Path, number: int) -> None:
        """Tokens to the part in `store`, the rest to `folder`."""
        lists = (_lists(self._ids, self._id_ends), _lists(self._spans, self._span_ends))
        write_table(pa.table(lists, schema=PART_SCHEMA), store / part_name(number))
        columns = {name: np.asarray(values) for name, values in self._numbers.items()}
        columns["tags"] = pa.array(self._tags, pa.string()).dictionary_encode()
        columns["signature"] = pa.FixedSizeListArray.from_arrays(pa.array(np.asarray(self._signatures)), SIGNATURE)
        write_table(pa.table(columns), columns_path(folder, number))


def _lists(values: array[int], ends: array[int]) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(np.asarray(ends)), pa.array(np.asarray(values)))


@dataclass(slots=True)
class Totals:
    """Sums over the samples of an index.

    Attributes:
        samples, rows_used, tokens, supervised, eligible: how many; a row that gives several samples counts once.
        lengths: length → samples.
        tags: tag → samples and tokens.
    """

    samples: int = 0
    rows_used: int = 0
    tokens: int = 0
    supervised: int = 0
    eligible: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    tags: dict[str, TagTotals] = field(default_factory=dict)

    def add(self, part: pa.Table) -> None:
        """Add the samples of one part, in the order of their rows."""
        if not part.num_rows:
            return
        lengths, supervised = part["length"].to_numpy(), part["supervised"].to_numpy()
        self.samples += part.num_rows
        self.rows_used += 1 + int(np.count_nonzero(np.diff(part["line"].to_numpy())))
        self.tokens += int(lengths.sum())
        self.supervised += int(supervised.sum())
        self.eligible += int(part["eligible"].to_numpy().sum())
        for length, count in zip(*np.unique(lengths, return_counts=True), strict=True):
            self.lengths[int(length)] = self.lengths.get(int(length), 0) + int(count)
        tags = part["tags"].chunk(0)
        codes = tags.indices.to_numpy()
        sums = [np.bincount(codes, weights, len(tags.dictionary)) for weights in (None, lengths, supervised)]
        for text, samples, tokens, learned in zip(tags.dictionary.to_pylist(), *sums, strict=True):
            for tag in filter(None, text.split(",") if samples else ()):
                total = self.tags.setdefault(tag, TagTotals())
                total.samples += int(samples)
                total.tokens += int(tokens)
                total.supervised_tokens += int(learned)


@contextmanager
def index_writer(folder: Path) -> Generator[IndexWriter, None, None]:
    """An `IndexWriter` with files in `folder` that have no names there, and are gone when it is left."""
    with ExitStack() as opened:
        files: dict[str, IO[bytes]] = {
            name: opened.enter_context(tempfile.TemporaryFile(dir=folder)) for name in INDEX_SCHEMA.names
        }
        yield IndexWriter(files)


class IndexWriter:
    """Gathers the columns of the index in files, of which it is then written as one batch.

    Args:
        files: one for each column, open for writing and reading.
    """

    def __init__(self, files: dict[str, IO[bytes]]) -> None:
        self.totals = Totals()
        self._codes: dict[str, int] = {}
        self._files = files

    def append(self, number: int, columns: pa.Table, rows: np.ndarray) -> None:
        """Add rows (ascending) of one part."""
        taken = columns.drop_columns(["signature", "content_hash"]).take(pa.array(rows)).combine_chunks()
        self.totals.add(taken)
        for name in _NUMBERS.keys() & self._files.keys():
            taken[name].to_numpy().tofile(self._files[name])
        rows.astype(np.int32).tofile(self._files["row"])
        np.full(len(rows), number, dtype=np.int32).tofile(self._files["part"])
        for tags in taken["tags"].chunks:
            own = [self._codes.setdefault(text, len(self._codes)) for text in tags.dictionary.to_pylist()]
            np.asarray(own, dtype=np.int32)[tags.indices.to_numpy()].tofile(self._files["tags"])

    def write(self, store: Path) -> None:
        """Write the index; at least one sample must be there."""
        columns: list[pa.Array] = []
        for field_ in INDEX_SCHEMA:
            coded = pa.types.is_dictionary(field_.type)
            kind = field_.type.index_type if coded else field_.type
            self._files[field_.name].flush()
            mapped = pa.array(np.memmap(self._files[field_.name], kind.to_pandas_dtype(), mode="r"), kind)
            words = pa.array(self._codes, pa.string())
            columns.append(pa.DictionaryArray.from_arrays(mapped, words) if coded else mapped)
        write_table(pa.table(columns, schema=INDEX_SCHEMA), store / INDEX)


class AllColumns:
    """The columns of all parts, one part in memory at a time; samples are numbered over all of them.

    Args:
        folder: of the parts' columns.
        numbers: of the parts, in order.
    """

    def __init__(self, folder: Path, numbers: list[int]) -> None:
        self._folder = folder
        self._numbers = numbers
        self.starts = np.cumsum([0, *(table.num_rows for _, table in self)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __iter__(self) -> Iterator[tuple[int, pa.Table]]:
        return ((number, read_table(columns_path(self._folder, number))) for number in self._numbers)

    def hashes(self) -> Iterator[np.ndarray]:
        """Content hashes of part after part."""
        return (table["content_hash"].to_numpy() for _, table in self)

    def origin(self, sample: int) -> tuple[int, int]:
        """Source and line of one sample."""
        place = int(np.searchsorted(self.starts, sample, side="right")) - 1
        table = read_table(columns_path(self._folder, self._numbers[place]))
        row = int(sample - self.starts[place])
        return table["source"][row].as_py(), table["line"][row].as_py()

    def signatures(self, file: IO[bytes]) -> None:
        """Write all signatures, uint32 [samples, SIGNATURE], to a file."""
        for _, table in self:
            for chunk in table["signature"].chunks:
                chunk.flatten().to_numpy().tofile(file)
