"""A run as it is on disk, read for the report: tolerant of what is missing, strict about what is no run at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import MetricError, RunDirectoryError
from paceline.observe.catalogue import find, number_of
from paceline.observe.metrics_file import (
    FORMAT,
    METRICS_FILE,
    EventLine,
    HeaderLine,
    Line,
    StepLine,
    gap_text,
    read_lines,
)
from paceline.observe.run_files import read_evaluations, read_facts, read_settings, shortened

MOST = 1e40
"""Larger values are beyond float32 and beyond all measure; their squares and sums would be too."""
MAX_MEMBERS = 256
"""Metrics of one family that are read: as many buckets as a plan can have."""
MAX_GAPS = 5
"""Gaps in the steps that are told one by one."""
TAG_LOSS = "loss/tag_"


@dataclass(frozen=True)
class History:
    """What a run directory says. L lines of metrics.

    Attributes:
        run_dir: where it is.
        header: facts that the trainer gave at the newest start.
        starts: steps at which the run was started, 0 first.
        total_steps: optimizer steps planned; 0 where unknown.
        steps: last optimizer step of each line, int64 [L].
        spans: optimizer steps in each line, int64 [L].
        epochs, windows: int64 [L].
        batches: plan indices of the micro-batches of each line.
        times: when each line was written, seconds since 1970, float64 [L].
        values, weights: by metric name, float64 [L], NaN where a line has none.
        events: in order.
        settings: resolved settings, nested.
        facts: run.json.
        evaluations: by ascending step.
        notes: one sentence for each thing that is missing.
    """

    run_dir: Path
    header: dict[str, Any]
    starts: list[int]
    total_steps: int
    steps: np.ndarray
    spans: np.ndarray
    epochs: np.ndarray
    windows: np.ndarray
    batches: list[list[int]]
    times: np.ndarray
    values: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    events: list[EventLine]
    settings: dict[str, Any]
    facts: dict[str, Any]
    evaluations: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.run_dir.resolve().name

    @property
    def status(self) -> str:
        """How the run ended, or ``not closed`` while it runs or after a kill."""
        closed = [event for event in self.events if event.event == "closed"]
        if not closed or (self.steps.size and self.steps[-1] > closed[-1].step):
            return "not closed"
        return str(closed[-1].fields.get("status", "closed"))

    @property
    def line(self) -> str:
        """What a line of metrics is: ``step``, ``line of 10 steps``, ``line of up to 10 steps``."""
        if not self.spans.size or self.spans.max() <= 1:
            return "step"
        most = int(self.spans.max())
        # The last line of an epoch or before a checkpoint may be shorter.
        return f"line of {'' if np.mean(self.spans == most) > 0.9 else 'up to '}{most} steps"

    def series(self, name: str) -> np.ndarray:
        """Values of one metric, float64 [L]; all NaN where it was never logged."""
        return self.values.get(name, np.full(self.steps.size, np.nan))

    def counts(self, name: str) -> np.ndarray:
        """Like `series`, 0 where a line has none; for counts and shares."""
        return np.nan_to_num(self.series(name), nan=0.0, posinf=0.0, neginf=0.0)

    def numbers(self, family: str) -> list[int]:
        """Numbers that occur in a one-number family, ascending: ``loss/bucket_{bucket}`` → [0, 1, 2]."""
        return sorted({number for name in self.values if (number := number_of(name, family)) is not None})

    @property
    def tags(self) -> list[str]:
        """Tags that were told apart, in alphabetical order."""
        return sorted(name.removeprefix(TAG_LOSS) for name in self.values if name.startswith(TAG_LOSS))

    def pooled(self, name: str, part: slice | np.ndarray = slice(None)) -> float:
        """One value over many lines, as the catalogue reduces it: Σ numerators / Σ denominators where it is a ratio."""
        values = self.series(name)[part]
        weights = self.weights.get(name)
        scale = self.spans[part] if weights is None else weights[part]
        good = np.isfinite(values) & np.isfinite(scale) & (scale > 0)
        return float(np.sum(values[good] * scale[good]) / np.sum(scale[good])) if good.any() else float("nan")


def read_history(run_dir: Path) -> History:
    """Everything that a run directory says.

    Raises:
        RunDirectoryError: no such directory, or nothing of a run in it.
    """
    if not run_dir.is_dir():
        what = "is a file" if run_dir.exists() else "does not exist"
        raise RunDirectoryError(f"{run_dir}: {what}; give the directory of a run")
    present = [name for name in (METRICS_FILE, "settings.yaml", "run.json") if (run_dir / name).is_file()]
    if not present:
        raise RunDirectoryError(
            f"{run_dir}: no run in there ({METRICS_FILE}, settings.yaml and run.json are missing); "
            "give the directory of a run"
        )
    notes: list[str] = []
    lines: list[Line] = []
    if METRICS_FILE in present:
        lines, more = read_lines(run_dir / METRICS_FILE)
        notes += more
    else:
        notes.append(f"{METRICS_FILE} is missing: no step was taken yet, or the file was moved away")
    settings, facts = read_settings(run_dir, notes), read_facts(run_dir, notes)
    return assemble(run_dir, lines, settings, facts, read_evaluations(run_dir, notes), notes)


def assemble(
    run_dir: Path,
    lines: Iterable[Line],
    settings: dict[str, Any],
    facts: dict[str, Any],
    evaluations: list[dict[str, Any]],
    notes: list[str],
) -> History:
    """A history from lines of metrics and what stands beside them; ``notes`` is added to."""
    lines = list(lines)
    headers = [line for line in lines if isinstance(line, HeaderLine)]
    steps = _ascending([line for line in lines if isinstance(line, StepLine)], notes)
    formats = {line.format for line in headers}
    if steps and not headers:
        notes.append(f"{METRICS_FILE} has no header line: what was planned is unknown")
    if formats - {FORMAT}:
        notes.append(
            f"{METRICS_FILE} has format {', '.join(map(str, sorted(formats)))}, this version writes {FORMAT}: "
            "metrics that were renamed in between are missing here"
        )
    if (run_dir / METRICS_FILE).is_file() and not steps:
        notes.append(f"{METRICS_FILE} has no optimizer step yet")
    notes += _gaps(steps)
    known = _known(steps, notes)
    return History(
        run_dir=run_dir,
        header=headers[-1].header if headers else {},
        starts=[line.step for line in headers],
        total_steps=headers[-1].total_steps if headers else 0,
        steps=np.array([line.step for line in steps], dtype=np.int64),
        spans=np.array([line.steps for line in steps], dtype=np.int64),
        epochs=np.array([line.epoch for line in steps], dtype=np.int64),
        windows=np.array([line.window for line in steps], dtype=np.int64),
        batches=[line.batches for line in steps],
        times=np.array([line.time for line in steps], dtype=np.float64),
        values=_columns([line.values for line in steps], known, notes),
        weights=_columns([line.weights for line in steps], known, []),
        events=[line for line in lines if isinstance(line, EventLine)],
        settings=settings,
        facts=facts,
        evaluations=evaluations,
        notes=notes,
    )


def _ascending(lines: list[StepLine], notes: list[str]) -> list[StepLine]:
    """The lines without those whose steps earlier ones cover; no run writes such, a file put together may hold them."""
    kept: list[StepLine] = []
    for line in lines:
        if not kept or line.step - line.steps >= kept[-1].step:
            kept.append(line)
    if len(kept) < len(lines):
        notes.append(f"{len(lines) - len(kept)} lines repeat steps that earlier lines cover, and are left out")
    return kept


def _gaps(lines: list[StepLine]) -> list[str]:
    """A sentence for each stretch of steps that no line covers."""
    last, found = 0, []
    for line in lines:
        if line.step - line.steps > last:
            found.append(gap_text(last + 1, line.step - line.steps))
        last = line.step
    more = [f"and {len(found) - MAX_GAPS} more such gaps"] if len(found) > MAX_GAPS else []
    return found[:MAX_GAPS] + more


def _known(lines: list[StepLine], notes: list[str]) -> set[str]:
    """Names that are in the catalogue, of each family no more than `MAX_MEMBERS`; a note on the others."""
    members: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name in dict.fromkeys(name for line in lines for name in line.values):
        try:
            members.setdefault(find(name).name, []).append(name)
        except MetricError:
            unknown.append(name)
    if unknown:
        shown = ", ".join(shortened(name, 40) for name in unknown[:5]) + (", …" if len(unknown) > 5 else "")
        notes.append(f"{len(unknown)} metrics that this version does not know are left out ({shown})")
    kept: set[str] = set()
    for family, names in members.items():
        names.sort(key=lambda name: (len(name), name))
        kept.update(names[:MAX_MEMBERS])
        if len(names) > MAX_MEMBERS:
            notes.append(f"{len(names) - MAX_MEMBERS} of {len(names)} metrics {family} are left out")
    return kept


def _columns(rows: list[Mapping[str, float | None]], known: set[str], notes: list[str]) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {}
    beyond = 0
    for position, row in enumerate(rows):
        for name in known & row.keys():
            if name not in columns:
                columns[name] = np.full(len(rows), np.nan)
            value = row[name]
            if value is not None and abs(value) <= MOST:
                columns[name][position] = value
            beyond += value is not None and abs(value) > MOST
    if beyond:
        notes.append(f"{beyond} values beyond {MOST:g} are left out")
    return columns
