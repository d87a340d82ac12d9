"""Lengths from a file: .npy, .npz, text with one length a line, JSONL, or a Parquet column."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.schema import MAX_COUNT
from paceline.errors import PlanError
from paceline.plan.entries import Groups, checked_eligible, checked_lengths, groups_of_labels

LENGTH_NAMES = ("length", "lengths", "num_tokens", "input_ids", "tokens")
"""Columns that are looked for where none is named; a column of lists counts their items."""
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    TypeError,
    ArithmeticError,
    NotImplementedError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What readers raise for files that are broken or of another kind than their name says."""
FAULTS_SHOWN = 5
"""Bad lines that are named one by one."""


@dataclass(frozen=True, slots=True)
class LengthsFile:
    """What a file says about its samples; eligible anchors and groups are None where it says nothing."""

    lengths: np.ndarray
    eligible: np.ndarray | None = None
    groups: Groups | None = None


def read_lengths(path: Path, column: str | None = None, group: str | None = None) -> LengthsFile:
    """Reads one file by its ending.

    Args:
        path: .npy; .npz; .jsonl or .ndjson; .parquet; anything else is text.
        column: array or column with the lengths; None: the only one there is, or the first of `LENGTH_NAMES`.
        group: column with a tag or source per sample (JSONL and Parquet), for ``plan.weights``.

    Returns:
        Checked lengths; eligible anchors where JSONL, .npz or Parquet have a column ``eligible``.

    Raises:
        PlanError: no such file, not of its kind, or lengths that are none: one line each, the first few.
    """
    reader = READERS.get(path.suffix.lower(), _read_text)
    if not path.is_file():
        raise PlanError(f"{path}: no such file; give a store, a run's YAML, or a file of lengths")
    try:
        columns = reader(path, column, group)
    except PlanError:
        raise
    except UNREADABLE as error:
        raise PlanError(f"{path}: cannot be read as {path.suffix or 'text'} ({error})") from error
    lengths = checked_lengths(_filled(columns["lengths"], path), f"{path}: lengths")
    eligible, labels = columns.get("eligible"), columns.get("group")
    return LengthsFile(
        lengths,
        None if eligible is None else checked_eligible(eligible, lengths),
        None if labels is None else groups_of_labels(labels),
    )


def _filled(values: Any, path: Path) -> Any:
    if np.size(values) == 0:
        raise PlanError(f"{path}: holds no lengths; there is nothing to plan")
    return values


def _read_npy(path: Path, column: str | None, group: str | None) -> dict[str, Any]:
    if column is not None or group is not None:
        raise PlanError(f"{path}: an .npy file has no columns; leave --column and --group out")
    return {"lengths": np.load(path, allow_pickle=False)}


def _read_npz(path: Path, column: str | None, group: str | None) -> dict[str, Any]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        names = list(arrays)
        chosen = _choose(path, names, column)
        found = {"lengths": arrays[chosen]}
        if "eligible" in names and chosen != "eligible":
            found["eligible"] = arrays["eligible"]
        if group is not None:
            found["group"] = arrays[_choose(path, names, group)]
    return found


def _read_parquet(path: Path, column: str | None, group: str | None) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    names = pq.read_schema(path).names
    chosen = _choose(path, names, column)
    wanted = [chosen, *(["eligible"] if "eligible" in names else [])]
    if group is not None:
        wanted.append(_choose(path, names, group))
    table = pq.read_table(path, columns=list(dict.fromkeys(wanted)))
    values = table[chosen]
    if values.null_count:
        first = pc.index(values.is_null(), True).as_py()
        raise PlanError(f"{path}: {chosen}[{first}] is missing; a length is a whole number of tokens, at least 1")
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = pc.call_function("list_value_length", [values])
    found: dict[str, Any] = {"lengths": values.to_numpy()}
    if "eligible" in names and chosen != "eligible":
        found["eligible"] = table["eligible"].to_numpy()
    if group is not None:
        found["group"] = np.array([str(value) for value in table[group].to_pylist()])
    return found


def _choose(path: Path, names: Sequence[str], asked: str | None) -> str:
    if asked is not None:
        if asked not in names:
            raise PlanError(f"{path}: has no column {asked}; it has {', '.join(names)}")
        return asked
    for name in LENGTH_NAMES:
        if name in names:
            return name
    if len(names) == 1:
        return names[0]
    raise PlanError(f"{path}: which column holds the lengths? name one with --column: {', '.join(names)}")


def _read_text(path: Path, column: str | None, group: str | None) -> dict[str, Any]:
    if column is not None or group is not None:
        raise PlanError(f"{path}: a text file has no columns; leave --column and --group out")
    lengths: list[int] = []
    errors: list[str] = []
    for number, line in _lines(path):
        try:
            lengths.append(int(line))
        except ValueError:
            header = " (a header line begins with #)" if not lengths and not errors else ""
            errors.append(f"{path}:{number}: {line[:40]!r} is not a whole number; write one length a line{header}")
            continue
        if not 1 <= lengths[-1] <= MAX_COUNT:
            errors.append(f"{path}:{number}: {lengths[-1]} is not a length; allowed: 1 to {MAX_COUNT}")
    _refuse(errors)
    return {"lengths": np.array(lengths, np.int64)}


def _read_jsonl(path: Path, column: str | None, group: str | None) -> dict[str, Any]:
    import msgspec

    lengths: list[int] = []
    eligible: list[int] = []
    labels: list[str] = []
    errors: list[str] = []
    decode = msgspec.json.decode
    for number, line in _lines(path):
        try:
            row = decode(line)
        except msgspec.DecodeError as error:
            errors.append(f"{path}:{number}: not valid JSON ({error})")
            continue
        length, error_text = _length_of(row, column)
        if error_text:
            errors.append(f"{path}:{number}: {error_text}")
            continue
        lengths.append(length)
        if isinstance(row, dict):
            if "eligible" in row:
                eligible.append(row["eligible"])
            if group is not None:
                if group not in row:
                    errors.append(f"{path}:{number}: has no column {group}; it has {', '.join(list(row)[:8])}")
                labels.append(str(row.get(group, "")))
        elif group is not None:
            errors.append(f"{path}:{number}: has no column {group}; it is no object")
    _refuse(errors)
    if eligible and len(eligible) != len(lengths):
        raise PlanError(f"{path}: {len(eligible)} of {len(lengths)} rows have `eligible`; give it in every row or none")
    found: dict[str, Any] = {"lengths": np.array(lengths, np.int64)}
    if eligible:
        found["eligible"] = np.array(eligible)
    if group is not None:
        found["group"] = np.array(labels)
    return found


def _length_of(row: Any, column: str | None) -> tuple[int, str]:
    """Length of one JSONL row, or what is wrong with it."""
    if isinstance(row, dict):
        names = [column] if column is not None else [name for name in LENGTH_NAMES if name in row]
        if not names or names[0] not in row:
            asked = column if column is not None else f"any of {', '.join(LENGTH_NAMES)}"
            return 0, f"has no {asked}; it has {', '.join(list(row)[:8])}; name the column with --column"
        row = row[names[0]]
    if isinstance(row, list):
        row = len(row)
    if isinstance(row, bool) or not isinstance(row, int) or not 1 <= row <= MAX_COUNT:
        shown = "null" if row is None else json.dumps(row)[:40]
        return 0, f"{shown} is not a length; allowed: 1 to {MAX_COUNT}"
    return row, ""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            text = line.strip()
            if text and not text.startswith("#"):
                yield number, text


def _refuse(errors: Sequence[str]) -> None:
    if errors:
        more = [f"... and {len(errors) - FAULTS_SHOWN:,} more such lines"] if len(errors) > FAULTS_SHOWN else []
        raise PlanError(*errors[:FAULTS_SHOWN], *more)


READERS: dict[str, Callable[[Path, str | None, str | None], dict[str, Any]]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
}
