"""metrics.jsonl: one JSON object a line, the truth of a run. Writing, cutting back on resume, reading what is there.

Each line goes to the operating system by itself, so it survives the death of the process at any moment; at worst the
last line is half written, and the next start cuts it off. Line kinds:

- ``header``: once a start; ``format`` is the version of this file's layout.
- ``step``: ``values`` by metric name (null = not a number) and, for ratios, their denominators in ``weights``, over
  ``steps`` optimizer steps up to and including ``step``.
- ``event``: anything else that happened, with the last step before it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.atomic_files import open_itself
from paceline.errors import RunDirectoryError
from paceline.text import first_line, readable

METRICS_FILE = "metrics.jsonl"
FORMAT = 1
MAX_GAPS = 5
"""Gaps in the steps that are named one by one."""


class HeaderLine(msgspec.Struct, frozen=True, tag_field="kind", tag="header"):
    """Written at each start of the run."""

    step: int
    time: float
    format: int
    total_steps: int
    header: dict[str, Any]


class StepLine(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
    """Metrics of ``steps`` optimizer steps, the last of which is ``step`` (1-based)."""

    step: int
    time: float
    steps: int
    epoch: int
    window: int
    batches: list[int]
    values: Mapping[str, float | None]
    weights: Mapping[str, float | None]


class EventLine(msgspec.Struct, frozen=True, tag_field="kind", tag="event"):
    """Something that happened after ``step``."""

    step: int
    time: float
    event: str
    fields: dict[str, Any]


Line = HeaderLine | StepLine | EventLine


class _Place(msgspec.Struct):
    """The part of a line that cutting back needs."""

    step: int
    kind: str
    steps: int = 1


def gap_text(first: int, last: int) -> str:
    """What is said of steps that no line covers."""
    steps = f"steps {first}–{last}" if last > first else f"step {first}"
    return (
        f"no metrics of {steps}: the run was killed between a checkpoint and its line, or the lines were lost; "
        "they were trained, and the counts here lack them"
    )


def _plain(value: Any) -> Any:
    """What JSON can hold in place of something that it cannot: numpy values as numbers, the rest as text."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_DECODER = msgspec.json.Decoder(Line)
_STEP = msgspec.json.Decoder(StepLine)
_PLACE = msgspec.json.Decoder(_Place)


def encode(message: msgspec.Struct) -> bytes:
    """One line of JSON without its newline.

    Not-a-number becomes null; bytes of a file's name that are not text become question marks.
    """
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        return _ENCODER.encode(_readable(msgspec.to_builtins(message, enc_hook=_plain)))


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {_readable(key): _readable(inner) for key, inner in value.items()}
    return [_readable(inner) for inner in value] if isinstance(value, list) else value


class MetricsFile:
    """Appends lines to a metrics file.

    Args:
        path: the file; made if it is not there.
        first_step: step of the checkpoint that the run resumes from; lines after it are cut off, because they will
            be written again.
        begins: steps that were taken before the run, by another trainer; no line covers them.

    Raises:
        RunDirectoryError: the file cannot be written, or is not a metrics file.
    """

    def __init__(self, path: Path, first_step: int, begins: int = 0) -> None:
        self.path = path
        try:
            self._descriptor = open_itself(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            with path.open("rb") as stream:
                keep, last, self.gaps = _length_to_keep(stream.read(), first_step, path, begins)
            os.ftruncate(self._descriptor, keep)
        except RunDirectoryError:
            raise
        except OSError as error:
            raise _unwritable(path, error) from error
        self.last_step_line = last
        """The newest step line that was kept, if any."""

    def lost(self) -> str | None:
        """What somebody has done to the file since it was opened; None where its name still leads to it."""
        try:
            there = self.path.stat()
        except OSError as error:
            return f"{self.path}: was removed while the run wrote it ({error.strerror})"
        if not os.path.samestat(there, os.fstat(self._descriptor)):
            return f"{self.path}: was replaced by another file while the run wrote it"
        return None

    def append(self, line: Line) -> None:
        """Write one line through to the operating system.

        Raises:
            RunDirectoryError: disk full, or the directory is gone.
        """
        data = encode(line) + b"\n"
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def sync(self) -> None:
        """Wait until every line is on the disk itself.

        Raises:
            RunDirectoryError: it is not.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Sync to the disk and close."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)


def read_lines(path: Path) -> tuple[list[Line], list[str]]:
    """All lines that can be read, and one sentence for each thing that is missing.

    Raises:
        RunDirectoryError: no such file, it cannot be read, or nothing in it is a metric line.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read ({first_line(error)}); give the directory of a run") from error
    rows = raw.split(b"\n")
    tail = rows.pop()
    lines: list[Line] = []
    bad: list[int] = []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(_DECODER.decode(row))
        except (msgspec.DecodeError, UnicodeDecodeError):
            bad.append(number)
    if bad and not lines:
        raise RunDirectoryError(
            f"{path}: not a metrics file of paceline (line 1 is not a metric line); give another run"
        )
    notes: list[str] = []
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
        notes.append(f"{path.name}: {len(bad)} of {len(rows)} lines cannot be read and are left out (line {shown})")
    if tail:
        notes.append(f"{path.name}: the last line is half written (the run was killed or still writes) and is left out")
    return lines, notes


def newest_lines(path: Path, num_bytes: int = 2**20) -> list[Line]:
    """The newest header, then the lines in the last ``num_bytes`` of a file: quick, however long the run is.

    Raises:
        RunDirectoryError: no such file, or it cannot be read.
    """
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            start = max(size - num_bytes, 0)
            raw = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            header = raw.rfind(b'{"kind":"header"', 0, start)
            rows = [raw[header : raw.find(b"\n", header)]] if header >= 0 else []
            rows += raw[raw.find(b"\n", start) + 1 if start else 0 :].split(b"\n")[:-1]
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read ({first_line(error)}); give the directory of a run") from error
    lines: list[Line] = []
    for row in rows:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            lines.append(_DECODER.decode(row))
    return lines


_OPENING = b'{"kind":'
"""How every line begins; a half-written one may be cut off anywhere, in here too."""


Gap = tuple[int, int]
"""First and last of some steps that no line covers."""


def _length_to_keep(raw: bytes, first_step: int, path: Path, begins: int) -> tuple[int, StepLine | None, list[Gap]]:
    """Bytes up to the first line after ``first_step`` or up to a half-written last line; the last step line kept.

    Also the gaps before it that no start has noted: where lines were cut out of the file. One that a start found is
    followed by the header of that start.
    """
    keep, covered = 0, begins
    gaps: list[Gap] = []
    newest: tuple[int, int] | None = None
    while (end := raw.find(b"\n", keep)) >= 0:
        try:
            place = _PLACE.decode(raw[keep:end])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _no_line(path, raw, keep, error) from error
        if place.step > first_step:
            break
        if place.kind == "step":
            newest = (keep, end)
            if place.step - place.steps > covered:
                gaps.append((covered + 1, place.step - place.steps))
        if place.kind != "event":
            covered = place.step
        keep = end + 1
    tail = raw[keep:]
    if tail and b"\n" not in tail and not (tail.startswith(_OPENING) or _OPENING.startswith(tail)):
        raise RunDirectoryError(
            f"{path}: its end is not a metric line, cut or whole; move the file away or give another run directory"
        )
    if newest is None:
        return keep, None, gaps
    try:
        return keep, _STEP.decode(raw[slice(*newest)]), gaps
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _no_line(path, raw, newest[0], error) from error


def _no_line(path: Path, raw: bytes, start: int, error: Exception) -> RunDirectoryError:
    number = raw.count(b"\n", 0, start) + 1
    return RunDirectoryError(
        f"{path}:{number}: not a metric line ({error}); move the file away or give another run directory"
    )


def _unwritable(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path}: cannot be written ({first_line(error)}); free space or repair it, then run again"
    )
