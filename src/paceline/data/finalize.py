"""The end of preparing: duplicates over all parts, index, manifest, report, and the renaming of the folder.

Nothing that an ended run needs is removed before the store is in its place, so finishing can be ended anywhere and
done again.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from paceline.config import DataConfig
from paceline.data.dedup import SIGNATURE, near_duplicates, repeats
from paceline.data.holdout import join_heldout
from paceline.data.index import AllColumns, Totals, index_writer
from paceline.data.readers import RowSource, Shard
from paceline.data.report import NOTES, REASONS, Count, PrepareReport, Tally, length_histogram, length_percentiles
from paceline.data.store import FORMAT, MANIFEST
from paceline.data.tokenize_rows import read_tally, store_folder
from paceline.data.warn import warnings_of
from paceline.errors import DataError
from paceline.types import JsonDict


def finalize(
    aside: Path,
    store: Path,
    pieces: Sequence[Shard],
    sources: Sequence[RowSource],
    fingerprint: str,
    ingredients: JsonDict,
    settings: DataConfig,
    *,
    target: Mapping[str, str],
    progress: Callable[[str, int, int], None],
    warnings: Sequence[str] = (),
) -> PrepareReport:
    """Make a store of the finished parts in `aside` and rename it to `store`; `target` is noted in its manifest, and
    `warnings` in the report.

    Raises:
        DataError: no sample is left; one line with the reasons and an example of each.
    """
    progress("finishing", 0, 3)
    made = store_folder(aside)
    numbers = [piece.number for piece in pieces]
    tally = Tally()
    for number in numbers:
        tally.add(read_tally(aside, number))
    samples = AllColumns(aside, numbers)
    keep = _unlike(aside, samples, settings, tally, sources)
    progress("finishing", 1, 3)
    with index_writer(aside) as index:
        for start, (number, columns) in zip(samples.starts.tolist(), samples, strict=False):
            kept = np.flatnonzero(keep[start : start + columns.num_rows])
            index.append(number, columns, _weighted(columns, kept, sources, tally))
        if not index.totals.samples:
            raise DataError(_nothing_left(tally))
        index.write(made)
        totals = index.totals
    heldout = join_heldout(aside, made, numbers)
    report = _report(store, fingerprint, totals, tally, settings, heldout)
    report.warnings.extend(warnings)
    manifest = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "ingredients": ingredients,
        "target": dict(target),
        "sources": [{"path": source.path, "kind": source.kind, "digest": source.digest} for source in sources],
        "num_samples": totals.samples,
        "report": report.to_json(),
        "words": {
            "set_aside": {reason: REASONS[reason] for reason in report.set_aside},
            "notes": {note: NOTES[note] for note in report.notes},
        },
    }
    (made / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    progress("finishing", 2, 3)
    _put_in_place(made, store)
    sweep(store)
    progress("finishing", 3, 3)
    return report


def sweep(store: Path, which: str = "[0-9a-f]" * 12) -> None:
    """Remove what ended runs left beside a store that is there; only under its lock.

    Args:
        store: folder of the store.
        which: first digits of the runs' fingerprints, a pattern.
    """
    for stale in store.parent.glob(f".{glob.escape(store.name)}.{which}.unfinished"):
        shutil.rmtree(stale)
    if (old := _replaced(store)).exists():
        shutil.rmtree(old)


def _unlike(
    aside: Path, samples: AllColumns, settings: DataConfig, tally: Tally, sources: Sequence[RowSource]
) -> np.ndarray:
    """Which samples are kept, bool; duplicates are counted."""

    def where(sample: int) -> str:
        source, line = samples.origin(sample)
        return f"{sources[source].path}:{line}"

    count = len(samples)
    first = np.ones(count, dtype=bool)
    if not count:
        return first
    for rows, _ in repeats(samples.hashes(), count, aside):
        first[rows] = False
    keep = first.copy() if settings.duplicates == "drop" else np.ones(count, dtype=bool)
    if not keep.all():
        tally.leave_out("duplicate", where(int(np.argmin(keep))), count=count - int(keep.sum()))
    near, example = 0, (count, count)
    with tempfile.TemporaryFile(dir=aside) as file:
        samples.signatures(file)
        file.flush()

        def read(rows: np.ndarray) -> np.ndarray:
            # Mapped for this reading only: what was read does not stay in the process.
            return np.array(np.memmap(file, np.uint32, mode="r", shape=(count, SIGNATURE))[rows])

        for rows, twins in near_duplicates(count, read, aside):
            rows, twins = rows[first[rows]], twins[first[rows]]
            near += len(rows)
            keep[rows] = settings.near_duplicates != "drop"
            example = min([example, *zip(rows.tolist(), twins.tolist(), strict=True)])
    if near:
        say = tally.leave_out if settings.near_duplicates == "drop" else tally.note
        say("near_duplicate", where(example[0]), f"like {where(example[1])}", near)
    return keep


def _weighted(columns: pa.Table, kept: np.ndarray, sources: Sequence[RowSource], tally: Tally) -> np.ndarray:
    """Rows of a part for the index: each kept one as often as its file's weight says.

    The whole part of a weight repeats a sample; for the rest, the sample's content decides like a coin.
    """
    if not len(kept):
        return kept
    source = sources[columns["source"][0].as_py()]
    hashes = columns["content_hash"].to_numpy()[kept] * np.uint64(0x9E3779B97F4A7C15)
    coin = (hashes >> np.uint64(11)).astype(np.float64) / 2**53
    times = int(source.weight) + (coin < source.weight % 1).astype(np.int64)
    never = kept[times == 0]
    if len(never):
        tally.leave_out("weight", f"{source.path}:{columns['line'][int(never[0])].as_py()}", count=len(never))
    return np.repeat(kept, times)


def _report(
    store: Path, fingerprint: str, totals: Totals, tally: Tally, settings: DataConfig, heldout: tuple[int, int]
) -> PrepareReport:
    lengths, counts = np.array(sorted(totals.lengths.items()), dtype=np.int64).T
    report = PrepareReport(
        store=str(store),
        fingerprint=fingerprint,
        rows_in=tally.rows_in,
        rows_used=totals.rows_used,
        samples=totals.samples,
        set_aside=_ordered(tally.set_aside),
        notes=_ordered(tally.notes),
        tokens=totals.tokens,
        supervised_tokens=totals.supervised,
        eligible_anchors=totals.eligible,
        lost_supervised_tokens=tally.lost_supervised_tokens,
        length_histogram=length_histogram(lengths, counts),
        length_percentiles=length_percentiles(lengths, counts),
        tags=dict(sorted(totals.tags.items(), key=lambda item: -item[1].tokens)),
        warnings=[],
        heldout_rows=heldout[0],
        heldout_documents=heldout[1],
    )
    report.warnings.extend(warnings_of(report, settings))
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
    return f"of {tally.rows_in} rows none can be trained on: {'; '.join(reasons)}"


def _replaced(store: Path) -> Path:
    return store.with_name(f".{store.name}.replaced")


def _put_in_place(made: Path, store: Path) -> None:
    for file in made.iterdir():
        _flush(file)
    _flush(made)
    store.parent.mkdir(parents=True, exist_ok=True)
    if store.exists():
        old = _replaced(store)
        if old.exists():
            shutil.rmtree(old)
        store.rename(old)
    made.rename(store)
    _flush(store.parent)


def _flush(path: Path) -> None:
    """Ask the system to write a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
