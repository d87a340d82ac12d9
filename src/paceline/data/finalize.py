"""The end of preparing: duplicates over all parts, index, manifest, report, and the renaming of the folder.

Nothing that an ended run needs is removed before the store is in its place, so finishing can be ended anywhere and done
again. Parts are looked at one at a time and columns gathered in files: memory does not grow with the samples, but for
3 bytes of marks each.
"""

from __future__ import annotations

import functools
import itertools
import re
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import pyarrow as pa

from paceline import atomic_files
from paceline.config import DataConfig
from paceline.data.coverage import warnings_of
from paceline.data.dedup import KEYS, are_near, repeats
from paceline.data.holdout import join_heldout
from paceline.data.readers import RowSource, Shard
from paceline.data.report import (
    NOTES,
    REASONS,
    Count,
    PrepareReport,
    TagTokens,
    Tally,
    length_histogram,
    length_percentiles,
)
from paceline.data.store import (
    FORMAT,
    INDEX,
    INDEX_SCHEMA,
    MANIFEST,
    USED_IDS,
    Manifest,
    Part,
    file_hash,
    part_name,
    read_table,
    write_manifest,
    write_table,
)
from paceline.data.tokenize_rows import columns_path, ids_path, looks_for_near, store_folder, tally_path
from paceline.errors import DataError
from paceline.types import JsonDict

_PAIRS = 64
"""Candidates for near-duplicates that are compared at once."""


@dataclass(frozen=True, slots=True)
class UnfinishedStore:
    """A store that is being made.

    Attributes:
        folder: where parts, their columns and tallies are.
        path: where the store is to be.
        sources, shards: of the data.
        settings: lengths and policies.
        fingerprint, ingredients, target: for the manifest.
        warnings: sentences for the report.
    """

    folder: Path
    path: Path
    sources: Sequence[RowSource]
    shards: Sequence[Shard]
    settings: DataConfig
    fingerprint: str
    ingredients: JsonDict
    target: dict[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def finalize(made: UnfinishedStore, progress: Callable[[str, int, int], None]) -> PrepareReport:
    """Make a store of the finished parts and rename it to its place.

    Raises:
        DataError: no sample is left; one line with the reasons and an example of each.
    """
    progress("finishing", 0, 3)
    folder, numbers = store_folder(made.folder), [shard.number for shard in made.shards]
    tally = Tally()
    for number in numbers:
        tally.add(msgspec.json.decode(tally_path(made.folder, number).read_bytes(), type=Tally))
    samples = _AllColumns(made.folder, numbers)
    twins = _repeated(made, samples, tally)
    progress("finishing", 1, 3)
    with _index_writer(made.folder) as index:
        for start, (number, columns) in zip(samples.starts.tolist(), samples, strict=False):
            kept = _unlike(columns, twins[start : start + columns.num_rows], made, tally)
            index.append(number, columns, _weighted(columns, kept, made, tally))
        if not index.totals.samples:
            raise DataError(_nothing_left(tally))
        index.write(folder)
    used = [np.fromfile(ids_path(made.folder, number), dtype=np.int32) for number in numbers]
    np.save(folder / USED_IDS, functools.reduce(np.union1d, used))
    heldout = join_heldout(made.folder, folder, numbers)
    report = _report(made, index.totals, tally, heldout)
    words = {
        "set_aside": {reason: REASONS[reason] for reason in report.set_aside},
        "notes": {note: NOTES[note] for note in report.notes},
    }
    files = {file.name: file_hash(file) for file in sorted(folder.iterdir()) if file.name != MANIFEST}
    manifest = Manifest(
        FORMAT, made.fingerprint, made.ingredients, list(made.sources), files, report, made.target, words
    )
    write_manifest(folder, manifest)
    progress("finishing", 2, 3)
    atomic_files.take_place(folder, made.path)
    sweep(made.path)
    progress("finishing", 3, 3)
    return report


def unfinished_folder(store: Path, fingerprint: str) -> Path:
    """Where a store is while it is made."""
    return store.with_name(f".{store.name}.{fingerprint[:12]}.unfinished")


def sweep(store: Path, fingerprint: str = "") -> None:
    """Remove what ended runs left beside a store that is there; only under its lock.

    Args:
        store: folder of the store.
        fingerprint: of the store that the runs were making; empty: of any.
    """
    whose = fingerprint[:12] or "[0-9a-f]{12}"
    for path in store.parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(store.name)}\.{whose}\.unfinished", path.name):
            atomic_files.remove(path)
    atomic_files.remove(atomic_files.replaced(store))


_EXACT, _NEAR = 1, 2
"""Marks of samples that came before: exactly, or nearly."""


def _repeated(made: UnfinishedStore, samples: _AllColumns, tally: Tally) -> np.ndarray:
    """Of every sample `_EXACT`, `_NEAR` or 0; near ones that are kept are counted."""
    count, settings = len(samples), made.settings
    marks = np.zeros(count, dtype=np.uint8)
    for rows, _ in repeats(samples.column("content_hash"), count, made.folder):
        marks[rows] = _EXACT
    example = (count, count)
    for key in range(KEYS if looks_for_near(settings) else 0):
        for rows, twins in repeats(samples.column(f"near{key}"), count, made.folder):
            fresh = marks[rows] == 0
            pairs = list(zip(rows[fresh].tolist(), twins[fresh].tolist(), strict=True))
            for some in (pairs[at : at + _PAIRS] for at in range(0, len(pairs), _PAIRS)):
                alike = are_near([(samples.ids(row), samples.ids(twin)) for row, twin in some])
                found = list(itertools.compress(some, alike))
                marks[[row for row, _ in found]] = _NEAR
                example = min([example, *found])
    if settings.near_duplicates == "keep" and (near := int((marks == _NEAR).sum())):
        row, twin = (samples.origin(sample, made.sources) for sample in example)
        tally.note("near_duplicate", Count(near, row, f"like {twin}"))
    return marks


def _unlike(columns: pa.Table, marks: np.ndarray, made: UnfinishedStore, tally: Tally) -> np.ndarray:
    """Rows of a part without the repetitions that are left out."""
    kept = np.ones(len(marks), dtype=bool)
    for reason, mark, policy in (
        ("duplicate", _EXACT, made.settings.duplicates),
        ("near_duplicate", _NEAR, made.settings.near_duplicates),
    ):
        if policy == "drop":
            _leave_out(reason, columns, np.flatnonzero(marks == mark), made, tally)
            kept &= marks != mark
    return np.flatnonzero(kept)


def _weighted(columns: pa.Table, kept: np.ndarray, made: UnfinishedStore, tally: Tally) -> np.ndarray:
    """Rows of a part for the index: each kept one as often as its file's weight says.

    The whole part of a weight repeats a sample; for the rest, the sample's content decides like a coin.
    """
    if not len(kept):
        return kept
    weight = made.sources[columns["source"][0].as_py()].weight
    hashes = columns["content_hash"].to_numpy()[kept] * np.uint64(0x9E3779B97F4A7C15)
    coin = (hashes >> np.uint64(11)).astype(np.float64) / 2**53
    times = int(weight) + (coin < weight % 1).astype(np.int64)
    _leave_out("weight", columns, kept[times == 0], made, tally)
    return np.repeat(kept, times)


def _leave_out(reason: str, columns: pa.Table, rows: np.ndarray, made: UnfinishedStore, tally: Tally) -> None:
    """Count rows (ascending) of a part that are left out."""
    if not len(rows):
        return
    left = columns.take(pa.array(rows)).combine_chunks()
    source, line = left["source"][0].as_py(), left["line"][0].as_py()
    lost = {tag: total.supervised_tokens for tag, total in _by_tag(left).items() if total.supervised_tokens}
    supervised = int(left["supervised"].to_numpy().sum())
    tally.leave_out(reason, Count(len(rows), f"{made.sources[source].path}:{line}", "", supervised, lost))


def _by_tag(part: pa.Table) -> dict[str, TagTokens]:
    """Samples and tokens of each tag in some rows of a part, in one chunk."""
    found: dict[str, TagTokens] = {}
    tags = part["tags"].chunk(0)
    codes, lengths, supervised = (values.to_numpy() for values in (tags.indices, part["length"], part["supervised"]))
    sums = [np.bincount(codes, weights, len(tags.dictionary)) for weights in (None, lengths, supervised)]
    for text, samples, tokens, learned in zip(tags.dictionary.to_pylist(), *sums, strict=True):
        for tag in filter(None, text.split(",") if samples else ()):
            total = found.setdefault(tag, TagTokens())
            total.samples += int(samples)
            total.tokens += int(tokens)
            total.supervised_tokens += int(learned)
    return found


class _AllColumns:
    """The columns of all parts, one part in memory at a time; samples are numbered over all of them."""

    def __init__(self, folder: Path, numbers: Sequence[int]) -> None:
        self._folder = folder
        self._numbers = numbers
        self._parts: dict[int, Part] = {}
        self.starts = np.cumsum([0, *(table.num_rows for _, table in self)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __iter__(self) -> Iterator[tuple[int, pa.Table]]:
        return ((number, read_table(columns_path(self._folder, number))) for number in self._numbers)

    def column(self, name: str) -> Iterator[np.ndarray]:
        """A column of part after part."""
        return (table[name].to_numpy() for _, table in self)

    def origin(self, sample: int, sources: Sequence[RowSource]) -> str:
        """`file:line` of one sample."""
        number, row = self._place(sample)
        table = read_table(columns_path(self._folder, number))
        return f"{sources[table['source'][row].as_py()].path}:{table['line'][row].as_py()}"

    def ids(self, sample: int) -> np.ndarray:
        """Token ids of one sample."""
        number, row = self._place(sample)
        if number not in self._parts:
            self._parts[number] = Part(store_folder(self._folder) / part_name(number))
        return self._parts[number].ids(row)

    def _place(self, sample: int) -> tuple[int, int]:
        """Part, and row in it."""
        place = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return self._numbers[place], int(sample - self.starts[place])


@dataclass(slots=True)
class _Totals:
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
    tags: dict[str, TagTokens] = field(default_factory=dict)

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
        for tag, found in _by_tag(part).items():
            total = self.tags.setdefault(tag, TagTokens())
            total.samples += found.samples
            total.tokens += found.tokens
            total.supervised_tokens += found.supervised_tokens


@contextmanager
def _index_writer(folder: Path) -> Generator[_IndexWriter]:
    """An `_IndexWriter` with files in `folder` that have no names there, and are gone when it is left."""
    with ExitStack() as opened:
        yield _IndexWriter({n: opened.enter_context(tempfile.TemporaryFile(dir=folder)) for n in INDEX_SCHEMA.names})


class _IndexWriter:
    """Gathers the columns of the index in files, one for each, of which it is then written as one batch."""

    def __init__(self, files: dict[str, IO[bytes]]) -> None:
        self.totals = _Totals()
        self._codes: dict[str, int] = {}
        self._files = files

    def append(self, number: int, columns: pa.Table, rows: np.ndarray) -> None:
        """Add rows (ascending) of one part."""
        taken = columns.take(pa.array(rows)).combine_chunks()
        self.totals.add(taken)
        values = {name: taken[name].to_numpy() for name in ("length", "eligible", "supervised", "source", "line")}
        values |= {"row": rows.astype(np.int32), "part": np.full(len(rows), number, dtype=np.int32)}
        for tags in taken["tags"].chunks:
            own = [self._codes.setdefault(text, len(self._codes)) for text in tags.dictionary.to_pylist()]
            values["tags"] = np.asarray(own, dtype=np.int32)[tags.indices.to_numpy()]
        for name, column in values.items():
            self._files[name].write(column.tobytes())

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


def _report(made: UnfinishedStore, totals: _Totals, tally: Tally, heldout: tuple[int, int]) -> PrepareReport:
    lengths, counts = np.array(sorted(totals.lengths.items()), dtype=np.int64).T
    lost = 0
    for count in (*tally.set_aside.values(), *tally.notes.values()):
        lost += count.lost
        for tag, tokens in count.lost_by_tag.items():
            totals.tags.setdefault(tag, TagTokens()).lost += tokens
    longest = tally.caps[-1].max_length
    report = PrepareReport(
        store=str(made.path),
        fingerprint=made.fingerprint,
        rows_in=tally.rows_in,
        rows_used=totals.rows_used,
        samples=totals.samples,
        set_aside=_ordered(tally.set_aside),
        notes=_ordered(tally.notes),
        tokens=totals.tokens,
        supervised_tokens=totals.supervised,
        eligible_anchors=totals.eligible,
        lost_supervised_tokens=lost,
        caps=[cap for cap in tally.caps[:-1] if cap.max_length < longest] + tally.caps[-1:],
        length_histogram=length_histogram(lengths, counts),
        length_percentiles=length_percentiles(lengths, counts),
        tags=dict(sorted(totals.tags.items(), key=lambda item: -item[1].tokens)),
        heldout_rows=heldout[0],
        heldout_documents=heldout[1],
    )
    report.warnings.extend([*warnings_of(report, made.settings), *made.warnings])
    return report


def _ordered(counts: dict[str, Count]) -> dict[str, Count]:
    return dict(sorted(counts.items(), key=lambda item: -item[1].count))


def _nothing_left(tally: Tally) -> str:
    if not tally.rows_in:
        return "the data files hold no rows; give files with one chat a line"
    reasons = [
        f"{count.count} × {REASONS[reason]}, for example {count.example}{f' ({count.detail})' if count.detail else ''}"
        for reason, count in _ordered(tally.set_aside).items()
    ]
    text = f"of {tally.rows_in} rows none can be trained on: {'; '.join(reasons)}"
    asked_both = tally.set_aside.get("heldout")
    if asked_both is not None and asked_both.count == tally.rows_in:
        text += (
            "; data.heldout asks all that data.train asks: name a file of other chats there, or drop data.heldout and "
            "set data.heldout_share: 0.02"
        )
    return text
