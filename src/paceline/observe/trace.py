"""Spans of stages and processes in one file that ui.perfetto.dev and chrome://tracing open.

Trace Event Format, JSON array: one event a line, written through at once. The format allows the closing bracket to be
missing, so a run that was killed leaves a trace that opens.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.atomic_files import open_itself
from paceline.errors import RunDirectoryError
from paceline.types import StepReport

TRACE_FILE = "trace.json"


class TraceFile:
    """Appends spans and counters; a trace of an earlier start of the run is replaced.

    Args:
        path: the file.

    Raises:
        RunDirectoryError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[tuple[str, str], tuple[int, int]] = {}
        self._processes: dict[str, int] = {}
        try:
            self._descriptor = open_itself(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise RunDirectoryError(
                f"{path}: cannot be written ({error.strerror}); switch observe.trace off"
            ) from error
        self._separator = b"[\n"

    def span(self, process: str, row: str, name: str, start_s: float, end_s: float, **details: Any) -> None:
        """One span.

        Args:
            process, row: where it is drawn: rows are grouped by process.
            name: on the span.
            start_s, end_s: seconds of one clock that all spans share, ``time.time()`` for example.
            details: shown when the span is clicked.
        """
        process_id, row_id = self._place(process, row)
        event = {"ph": "X", "name": name, "pid": process_id, "tid": row_id, "ts": start_s * 1e6}
        self._event({**event, "dur": max(end_s - start_s, 0.0) * 1e6, "args": details})

    def counter(self, process: str, name: str, at_s: float, **values: float) -> None:
        """Values drawn as a graph over time, such as queue depths."""
        process_id, _ = self._place(process, name)
        self._event({"ph": "C", "name": name, "pid": process_id, "tid": 0, "ts": at_s * 1e6, "args": values})

    def step(self, report: StepReport, ended_s: float, losses: Mapping[int, Any] | None = None) -> None:
        """An optimizer step, with how long each stage was busy, starved and blocked in it.

        Args:
            report: of the step.
            ended_s: when it ended.
            losses: of its micro-batches, by place in the plan, where they are asked for.
        """
        start_s = ended_s - report.seconds
        details = {"loss": _number(report.loss.value), "samples": report.samples, "batches": list(report.batches)}
        details |= {"seconds": {place: round(spent_s, 6) for place, spent_s in report.waits_s.items()}}
        details |= {"micro_batch_losses": dict(losses)} if losses is not None else {}
        name = f"step {report.step}"
        self.span("trainer", "steps", name, start_s, ended_s, window=report.window, epoch=report.epoch, **details)

    def close(self) -> None:
        """End the array and close the file."""
        self._write(b"\n]\n" if self._rows else b"[]\n")
        os.close(self._descriptor)

    def _place(self, process: str, row: str) -> tuple[int, int]:
        place = self._rows.get((process, row))
        if place is None:
            if process not in self._processes:
                self._processes[process] = len(self._processes) + 1
                self._name("process_name", self._processes[process], 0, process)
            place = (self._processes[process], len(self._rows) + 1)
            self._rows[process, row] = place
            self._name("thread_name", *place, row)
        return place

    def _name(self, what: str, process_id: int, row_id: int, name: str) -> None:
        self._event({"ph": "M", "name": what, "pid": process_id, "tid": row_id, "args": {"name": name}})

    def _event(self, event: dict[str, Any]) -> None:
        self._write(self._separator + json.dumps(event).encode())
        self._separator = b",\n"

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            os.close(self._descriptor)
            raise RunDirectoryError(
                f"{self._path}: cannot be written ({error.strerror}); free space or switch observe.trace off"
            ) from error


def _number(value: float) -> float | str:
    """JSON has no word for NaN and infinity."""
    return value if math.isfinite(value) else str(value)
