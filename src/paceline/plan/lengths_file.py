"""Lengths from a file: .npy, .npz, text with one length a line, JSONL, Parquet, Arrow, or a `save_to_disk` folder."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from paceline.config.schema import MAX_COUNT
from paceline.errors import PlanError
from paceline.plan.entries import Groups, checked_counts, checked_eligible, groups_of_labels
from paceline.text import absent, first_line

if TYPE_CHECKING:
    import pyarrow as pa

UNREADABLE = (
    *(OSError, ValueError, EOFError, zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, zlib.error),
    *(RecursionError, MemoryError, OverflowError, SyntaxError, TypeError, KeyError, tokenize.TokenError),
)
"""What the readers raise for files that hold something else, such as a header that asks for more than all memory."""
LENGTH_NAMES = ("length", "lengths", "num_tokens", "input_ids", "tokens")
"""Columns that are looked for where none is named; a column of lists counts their items."""
ERRORS_SHOWN = 5
"""Bad lines that are named one by one."""


@dataclass(frozen=True, slots=True)
class LengthsFile:
    """What a file says about its samples; eligible anchors and groups are None where it says nothing."""

    lengths: np.ndarray
    eligible: np.ndarray | None = None
    groups: Groups | None = None


@dataclass(slots=True)
class _Columns:
    """Columns as they were read."""

    lengths: Any
    eligible: Any = None
    labels: Any = None


def read_lengths(path: Path, column: str | None = None, group: str | None = None) -> LengthsFile:
    """Reads one file by its ending.

    Args:
        path: .npy; .npz; .jsonl or .ndjson; .parquet; .arrow; a folder that `datasets` saved; anything else is text.
        column: array or column with the lengths; None: the only one there is, or the first of `LENGTH_NAMES`.
        group: column with a tag or source per sample, for ``plan.weights``.

    Returns:
        Checked lengths; eligible anchors where the file has a column ``eligible``.

    Raises:
        PlanError: no such file, not of its kind, or numbers that are not lengths: one line each, the first few.
    """
    kind = path.suffix.lower()
    if not path.exists():
        raise PlanError(f"{path}: {absent(path, 'file')}; give a store, a run's YAML, or a file of lengths")
    if (column or group) and not path.is_dir() and kind not in (".npz", ".jsonl", ".ndjson", ".parquet", ".arrow"):
        raise PlanError(f"{path}: a {kind or 'text'} file has no columns; leave --column and --group out")
    try:
        if path.is_dir() or kind in (".parquet", ".arrow"):
            found = _from_table(path, column, group)
        elif kind in (".npy", ".npz"):
            found = _from_arrays(path, column, group)
        else:
            found = _from_lines(path, column, group, json=kind in (".jsonl", ".ndjson"))
    except PlanError:
        raise
    except UNREADABLE as error:
        raise PlanError(f"{path}: cannot be read as {kind or 'text'} ({first_line(error)})") from error
    lengths = checked_counts(found.lengths, f"{path}: lengths", 1)
    eligible, labels = found.eligible, found.labels
    return LengthsFile(
        lengths,
        None if eligible is None else checked_eligible(eligible, lengths),
        None if labels is None else groups_of_labels(labels),
    )


def _from_arrays(path: Path, column: str | None, group: str | None) -> _Columns:
    with path.open("rb") as file:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return _Columns(loaded)
        names = list(loaded)
        return _Columns(
            loaded[_choose(path, names, column)],
            loaded["eligible"] if "eligible" in names else None,
            loaded[_choose(path, names, group)] if group is not None else None,
        )


def _from_table(path: Path, column: str | None, group: str | None) -> _Columns:
    import pyarrow as pa
    import pyarrow.compute as pc

    names, read = _table(path)
    chosen = _choose(path, names, column)
    labels = _choose(path, names, group) if group is not None else None
    wanted = list(dict.fromkeys([chosen, *(name for name in names if name in ("eligible", labels))]))
    table = read(wanted)
    lengths = table[chosen]
    if lengths.null_count:
        first = pc.index(lengths.is_null(), True).as_py()
        raise PlanError(f"{path}: {chosen}[{first}] is missing; allowed: 1 to {MAX_COUNT}")
    if pa.types.is_list(lengths.type) or pa.types.is_large_list(lengths.type):
        lengths = pc.call_function("list_value_length", [lengths])
    return _Columns(
        lengths.to_numpy(),
        table["eligible"].to_numpy() if "eligible" in wanted else None,
        [str(value) for value in table[labels].to_pylist()] if labels is not None else None,
    )


def _table(path: Path) -> tuple[list[str], Callable[[list[str]], pa.Table]]:
    """Names of the columns, and how to read some of them."""
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_schema(path).names, lambda wanted: pq.read_table(path, columns=wanted)
    import datasets

    source = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_file(str(path))
    if isinstance(source, datasets.DatasetDict):
        raise PlanError(f"{path}: has several splits; name the folder of one: {', '.join(map(str, source))}")
    return source.column_names, lambda wanted: source.select_columns(wanted).with_format("arrow")[:]


def _choose(path: Path, names: Sequence[str], asked: str | None) -> str:
    if asked is not None:
        if asked not in names:
            raise PlanError(f"{path}: has no column {asked}; it has {', '.join(names)}")
        return asked
    known = [name for name in LENGTH_NAMES if name in names] or (names if len(names) == 1 else [])
    if not known:
        raise PlanError(f"{path}: which column holds the lengths? name one with --column: {', '.join(names)}")
    return known[0]


def _from_lines(path: Path, column: str | None, group: str | None, *, json: bool) -> _Columns:
    """Text or JSONL; every line is looked at before the first few errors are raised."""
    rows: list[_LengthRow] = []
    errors: list[str] = []
    for number, line in _lines(path):
        try:
            row = _row(line, column, group) if json else _LengthRow(_checked(int(line)))
        except msgspec.DecodeError as error:
            errors.append(f"{path}:{number}: not valid JSON ({error})")
        except KeyError as error:
            errors.append(f"{path}:{number}: has no column {error.args[0]}; it has {error.args[1]}")
        except ValueError as error:
            header = " (a header line begins with #)" if not json and not rows and not errors else ""
            shown = str(error) if json else line
            errors.append(f"{path}:{number}: {shown[:40]} is not a length; allowed: 1 to {MAX_COUNT}{header}")
        else:
            rows.append(row)
    if errors:
        more = [f"... and {len(errors) - ERRORS_SHOWN:,} more such lines"] if len(errors) > ERRORS_SHOWN else []
        raise PlanError(*errors[:ERRORS_SHOWN], *more)
    eligible = [row.eligible for row in rows if row.eligible is not None]
    if eligible and len(eligible) != len(rows):
        raise PlanError(f"{path}: {len(eligible)} of {len(rows)} rows have `eligible`; give it in every row or none")
    labels = [row.label for row in rows] if group is not None else None
    return _Columns(np.array([row.length for row in rows], np.int64), eligible or None, labels)


class _LengthRow(NamedTuple):
    """One line."""

    length: int
    eligible: int | None = None
    label: str = ""


def _row(line: str, column: str | None, group: str | None) -> _LengthRow:
    """One JSON line: an object, a list of tokens, or a number.

    Raises:
        msgspec.DecodeError: not JSON.
        KeyError: an object without such a column; the column and those that it has.
        ValueError: what is not a length.
    """
    row = msgspec.json.decode(line)
    if not isinstance(row, dict) and not column and not group:
        return _LengthRow(_checked(row))
    columns = row if isinstance(row, dict) else {}
    column = column or next((name for name in LENGTH_NAMES if name in columns), LENGTH_NAMES[0])
    for name in (column, group or column):
        if name not in columns:
            raise KeyError(name, ", ".join(list(columns)[:8]) or "no columns")
    return _LengthRow(_checked(columns[column]), columns.get("eligible"), str(columns[group]) if group else "")


def _checked(value: Any) -> int:
    """A length; a list counts its items."""
    if isinstance(value, list):
        value = len(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise ValueError(msgspec.json.encode(value).decode())
    return value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            text = line.strip()
            if text and not text.startswith("#"):
                yield number, text
