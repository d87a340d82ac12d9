"""The end of preparing: duplicates over all parts, index, manifest, report, and the renaming of the folder."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from paceline.config import DataConfig
from paceline.contracts import JsonDict
from paceline.data.report import (
    NOTES,
    REASONS,
    Count,
    PrepareReport,
    TagTotals,
    Tally,
    length_histogram,
    length_percentiles,
)
from paceline.data.similar import SIGNATURE, first_of_each, near_duplicates
from paceline.data.sources import Piece, Source
from paceline.data.split import join_heldout
from paceline.data.store import FORMAT, INDEX, INDEX_SCHEMA, MANIFEST, part_name, read_table, write_table
from paceline.data.tokenise import read_tally
from paceline.data.warn import warnings_of
from paceline.errors import DataError

_COLUMNS = ("length", "eligible", "supervised", "source", "line", "tags")


def finish(
    aside: Path,
    store: Path,
    pieces: Sequence[Piece],
    sources: Sequence[Source],
    fingerprint: str,
    ingredients: JsonDict,
    settings: DataConfig,
    *,
    target: Mapping[str, str],
    progress: Callable[[str, int, int], None],
) -> PrepareReport:
    """Make a store of the finished parts in `aside` and rename it to `store`; `target` is noted in its manifest.

    Raises:
        DataError: no sample is left; one line with the reasons and an example of each.
    """
    progress("finishing", 0, 3)
    tally = Tally()
    for piece in pieces:
        tally.add(read_tally(aside, piece.number))
    samples = _all_samples(aside, pieces)
    keep = _unlike(aside, pieces, samples, settings, tally, sources)
    progress("finishing", 1, 3)
    index = samples.take(pa.array(_weighted(samples, keep, sources, tally))).select(INDEX_SCHEMA.names)
    if not index.num_rows:
        raise DataError(_nothing_left(tally))
    write_table(index, aside / INDEX)
    heldout = join_heldout(aside, [piece.number for piece in pieces])
    report = _report(store, fingerprint, index, tally, settings, heldout)
    manifest = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "ingredients": ingredients,
        "target": dict(target),
        "sources": [{"path": source.path, "kind": source.kind, "digest": source.digest} for source in sources],
        "num_samples": index.num_rows,
        "report": report.to_json(),
        "words": {
            "set_aside": {reason: REASONS[reason] for reason in report.set_aside},
            "notes": {note: NOTES[note] for note in report.notes},
        },
    }
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    progress("finishing", 2, 3)
    for tally_file in aside.glob("part-*.json"):
        tally_file.unlink()
    _put_in_place(aside, store)
    for stale in store.parent.glob(f".{glob.escape(store.name)}.{'[0-9a-f]' * 12}.unfinished"):
        shutil.rmtree(stale)
    progress("finishing", 3, 3)
    return report


def _all_samples(aside: Path, pieces: Sequence[Piece]) -> pa.Table:
    """The index columns of every part with part and row numbers, and the content hash."""
    tables: list[pa.Table] = []
    for piece in pieces:
        part = read_table(aside / part_name(piece.number))
        count = part.num_rows
        columns = {name: part[name] for name in _COLUMNS}
        columns["part"] = pa.chunked_array([np.full(count, piece.number, dtype=np.int32)])
        columns["row"] = pa.chunked_array([np.arange(count, dtype=np.int32)])
        table = pa.table({name: columns[name].cast(INDEX_SCHEMA.field(name).type) for name in INDEX_SCHEMA.names})
        tables.append(table.append_column("content_hash", part["content_hash"]))
    return pa.concat_tables(tables).combine_chunks()


def _unlike(
    aside: Path,
    pieces: Sequence[Piece],
    samples: pa.Table,
    settings: DataConfig,
    tally: Tally,
    sources: Sequence[Source],
) -> np.ndarray:
    """Which samples are kept, bool; duplicates are counted."""

    def where(row: int) -> str:
        return f"{sources[samples['source'][row].as_py()].path}:{samples['line'][row].as_py()}"

    count = samples.num_rows
    keep = np.ones(count, dtype=bool)
    if not count:
        return keep
    first = first_of_each(samples["content_hash"].to_numpy())
    again = np.flatnonzero(~first)
    if settings.duplicates == "drop" and len(again):
        tally.leave_out("duplicate", where(int(again[0])), count=len(again))
        keep[again] = False
    twin = near_duplicates(count, _signatures(aside, pieces, samples))
    near = np.flatnonzero((twin >= 0) & first)
    if len(near):
        drop = settings.near_duplicates == "drop"
        say = tally.leave_out if drop else tally.note
        say("near_duplicate", where(int(near[0])), f"like {where(int(twin[near[0]]))}", len(near))
        keep[near] = not drop
    return keep


def _weighted(samples: pa.Table, keep: np.ndarray, sources: Sequence[Source], tally: Tally) -> np.ndarray:
    """Rows of the index: each kept sample as often as its file's weight says.

    The whole part of a weight repeats a sample; for the rest, the sample's content decides like a coin.
    """
    rows = np.flatnonzero(keep)
    weights = np.array([source.weight for source in sources])
    if (weights == 1.0).all():
        return rows
    weight = weights[samples["source"].to_numpy()[rows]]
    hashes = samples["content_hash"].to_numpy()[rows] * np.uint64(0x9E3779B97F4A7C15)
    coin = (hashes >> np.uint64(11)).astype(np.float64) / 2**53
    times = np.floor(weight).astype(np.int64) + (coin < weight % 1)
    never = rows[times == 0]
    if len(never):
        place = sources[samples["source"][int(never[0])].as_py()].path
        tally.leave_out("weight", f"{place}:{samples['line'][int(never[0])].as_py()}", count=len(never))
    return np.repeat(rows, times)


def _signatures(aside: Path, pieces: Sequence[Piece], samples: pa.Table) -> Callable[[np.ndarray], np.ndarray]:
    part_of, row_of = samples["part"].to_numpy(), samples["row"].to_numpy()
    columns = {piece.number: read_table(aside / part_name(piece.number))["signature"] for piece in pieces}

    def read(rows: np.ndarray) -> np.ndarray:
        found = np.empty((len(rows), SIGNATURE), dtype=np.uint32)
        parts = part_of[rows]
        for number in np.unique(parts).tolist():
            here = parts == number
            values = columns[number].chunk(0).values.to_numpy(zero_copy_only=True).reshape(-1, SIGNATURE)
            found[here] = values[row_of[rows[here]]]
        return found

    return read


def _report(
    store: Path,
    fingerprint: str,
    index: pa.Table,
    tally: Tally,
    settings: DataConfig,
    heldout: tuple[int, int],
) -> PrepareReport:
    lengths = index["length"].to_numpy()
    supervised = index["supervised"].to_numpy()
    rows = np.unique(np.stack([index["source"].to_numpy().astype(np.int64), index["line"].to_numpy()]), axis=1)
    report = PrepareReport(
        store=str(store),
        fingerprint=fingerprint,
        rows_in=tally.rows_in,
        rows_used=rows.shape[1],
        samples=index.num_rows,
        set_aside=_ordered(tally.set_aside),
        notes=_ordered(tally.notes),
        tokens=int(lengths.sum()),
        supervised_tokens=int(supervised.sum()),
        eligible_anchors=int(index["eligible"].to_numpy().sum()),
        lost_supervised_tokens=tally.lost_supervised_tokens,
        length_histogram=length_histogram(lengths),
        length_percentiles=length_percentiles(lengths),
        tags=_tag_totals(index, lengths, supervised),
        warnings=[],
        heldout_rows=heldout[0],
        heldout_documents=heldout[1],
    )
    report.warnings.extend(warnings_of(report, settings))
    return report


def _tag_totals(index: pa.Table, lengths: np.ndarray, supervised: np.ndarray) -> dict[str, TagTotals]:
    encoded = index["tags"].combine_chunks().dictionary_encode()
    encoded = encoded.chunk(0) if isinstance(encoded, pa.ChunkedArray) else encoded
    codes = encoded.indices.to_numpy()
    totals: dict[str, TagTotals] = {}
    for code, text in enumerate(encoded.dictionary.to_pylist()):
        inside = codes == code
        for tag in filter(None, text.split(",")):
            total = totals.setdefault(tag, TagTotals())
            total.samples += int(inside.sum())
            total.tokens += int(lengths[inside].sum())
            total.supervised_tokens += int(supervised[inside].sum())
    return dict(sorted(totals.items(), key=lambda item: -item[1].tokens))


def _ordered(counts: dict[str, Count]) -> dict[str, Count]:
    return dict(sorted(counts.items(), key=lambda item: -item[1].count))


def _nothing_left(tally: Tally) -> str:
    if not tally.rows_in:
        return "the data files hold no rows; give files with one chat a line"
    reasons = [
        f"{count.count} × {REASONS[reason]}, for example {count.example}{f' ({count.detail})' if count.detail else ''}"
        for reason, count in _ordered(tally.set_aside).items()
    ]
    return f"of {tally.rows_in} rows none can be trained on: {'; '.join(reasons)}"


def _put_in_place(aside: Path, store: Path) -> None:
    for file in aside.iterdir():
        _flush(file)
    _flush(aside)
    store.parent.mkdir(parents=True, exist_ok=True)
    old = store.with_name(f".{store.name}.replaced")
    if old.exists():
        shutil.rmtree(old)
    if store.exists():
        store.rename(old)
    aside.rename(store)
    _flush(store.parent)
    if old.exists():
        shutil.rmtree(old)


def _flush(path: Path) -> None:
    """Ask the system to write a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
