"""A run as it is on disk: what the report and the diagnosis read. What is missing or unreadable becomes a note."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from paceline.errors import MetricError, RunDirectoryError
from paceline.observe.catalogue import find, number_of
from paceline.observe.metrics_file import (
    FORMAT,
    MAX_GAPS,
    METRICS_FILE,
    EventLine,
    HeaderLine,
    Line,
    StepLine,
    gap_text,
    read_lines,
)
from paceline.text import absent, first_line, parsed_json

TAG_LOSS = "loss/tag_"


@dataclass(frozen=True)
class History:
    """What a run directory says. L lines of metrics.

    Attributes:
        run_dir: where it is.
        header: facts that the trainer gave at the newest start.
        starts: steps at which the run was started, 0 first.
        total_steps: optimizer steps planned; 0 where unknown.
        status: how the run ended, or ``not closed`` while it runs or after a kill.
        steps: last optimizer step of each line, int64 [L].
        spans: optimizer steps in each line, int64 [L].
        epochs, windows: int64 [L].
        batches: plan indices of the micro-batches of each line.
        times: when each line was written, seconds since 1970, float64 [L].
        values, weights: by metric name, float64 [L], NaN where a line has none.
        events: in order.
        settings: resolved settings, nested.
        facts: run.json.
        evaluations: under the run's settings, by ascending step.
        other_evaluations: under other settings.
        server_evaluations: of running servers.
        notes: one sentence for each thing that is missing.
    """

    run_dir: Path
    header: dict[str, Any]
    starts: list[int]
    total_steps: int
    status: str
    steps: np.ndarray
    spans: np.ndarray
    epochs: np.ndarray
    windows: np.ndarray
    batches: list[list[int]]
    times: np.ndarray
    values: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    events: list[EventLine]
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    other_evaluations: list[dict[str, Any]] = field(default_factory=list)
    server_evaluations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.run_dir.resolve().name

    @property
    def line(self) -> str:
        """What a line of metrics is: ``step``, ``line of 10 steps``, ``line of up to 10 steps``."""
        if not self.spans.size or self.spans.max() <= 1:
            return "step"
        most = int(self.spans.max())
        # The last line of an epoch or before a checkpoint may be shorter.
        return f"line of {'' if np.mean(self.spans == most) > 0.9 else 'up to '}{most} steps"

    @property
    def tags(self) -> list[str]:
        """Tags that the metrics distinguish, in alphabetical order."""
        return sorted(name.removeprefix(TAG_LOSS) for name in self.values if name.startswith(TAG_LOSS))

    def setting(self, section: str, name: str) -> Any:
        """A resolved setting of the run; None where the settings are not there."""
        return (self.settings.get(section) or {}).get(name)

    def series(self, name: str) -> np.ndarray:
        """Values of one metric, float64 [L]; all NaN where it was never logged."""
        return self.values.get(name, np.full(self.steps.size, np.nan))

    def counts(self, name: str) -> np.ndarray:
        """Like `series`, 0 where a line has none; for counts and shares."""
        return np.nan_to_num(self.series(name), nan=0.0)

    def numbers(self, family: str) -> list[int]:
        """Numbers that occur in a one-number family, ascending: ``loss/bucket_{bucket}`` → [0, 1, 2]."""
        return sorted({number for name in self.values if (number := number_of(name, family)) is not None})

    def pooled(self, name: str, part: slice | np.ndarray = slice(None)) -> float:
        """One value over many lines, as the catalogue reduces it: Σ numerators / Σ denominators where it is a ratio."""
        values = self.series(name)[part]
        weights = self.weights.get(name)
        scale = self.spans[part] if weights is None else weights[part]
        good = np.isfinite(values) & np.isfinite(scale) & (scale > 0)
        return float(np.sum(values[good] * scale[good]) / np.sum(scale[good])) if good.any() else float("nan")

    def decoded_tau(self) -> list[tuple[int, float]]:
        """(step, τ) of each evaluation of held-out prompts."""
        return [(entry["step"], entry["tau_micro"]) for entry in self.evaluations if entry.get("tau_micro") is not None]

    def held_out_tau(self) -> list[tuple[int, float]]:
        """(step, τ) on held-out data: of real decoding, or of the validation batches where those were more."""
        tau = self.series("validation/tau")
        measured = np.isfinite(tau)
        validated = [(int(step), float(value)) for step, value in zip(self.steps[measured], tau[measured], strict=True)]
        return max(self.decoded_tau(), validated, key=len)


def last_part(run: History, share: float = 0.1) -> slice:
    """The last part of a run's lines, at least one."""
    return slice(max(run.steps.size - max(int(run.steps.size * share), 1), 0), None)


def read_history(run_dir: Path) -> History:
    """Everything that a run directory says.

    Raises:
        RunDirectoryError: no such directory, or nothing of a run in it.
    """
    if not run_dir.is_dir():
        what = "is a file" if run_dir.exists() else absent(run_dir, "folder")
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
    settings = read_settings(run_dir, notes)
    facts = read_mapping(run_dir / "run.json", parsed_json, notes)
    found: dict[str, Any] = {}
    if (run_dir / "evaluation.json").exists():
        found = read_mapping(run_dir / "evaluation.json", parsed_json, notes)
    else:
        notes.append("evaluation.json is missing: no held-out prompt was decoded yet")
    run = assemble(run_dir, lines, settings=settings, facts=facts, notes=notes)
    return replace(
        run,
        evaluations=found.get("evaluations", []),
        other_evaluations=found.get("others", []),
        server_evaluations=found.get("servers", []),
    )


def read_settings(run_dir: Path, notes: list[str]) -> dict[str, Any]:
    """Resolved settings as a nested mapping."""
    return read_mapping(run_dir / "settings.yaml", yaml.safe_load, notes)


def read_mapping(path: Path, parse: Callable[[str], Any], notes: list[str]) -> dict[str, Any]:
    """A nested mapping from a file; an empty one, and a note, where it cannot be read."""
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({first_line(error)})")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} cannot be read (it has no names and values)")
        return {}
    return value


def assemble(
    run_dir: Path,
    lines: Iterable[Line],
    *,
    settings: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    notes: list[str] | None = None,
) -> History:
    """A history from lines of metrics and the other files of a run; ``notes`` is added to."""
    lines = list(lines)
    headers = [line for line in lines if isinstance(line, HeaderLine)]
    steps = [line for line in lines if isinstance(line, StepLine)]
    notes = [] if notes is None else notes
    if headers and headers[-1].format not in (0, FORMAT):
        notes.append(
            f"{METRICS_FILE} has format {headers[-1].format}, this version writes {FORMAT}: "
            "metrics that were renamed in between are missing here"
        )
    if (run_dir / METRICS_FILE).is_file() and not steps:
        notes.append(f"{METRICS_FILE} has no optimizer step yet")
    header = headers[-1].header if headers else {}
    notes += _gaps(steps, header.get("begins", {}).get("step", 0))
    known = _known(steps, notes)
    return History(
        run_dir=run_dir,
        header=header,
        starts=[line.step for line in headers],
        total_steps=headers[-1].total_steps if headers else 0,
        status=_status(lines),
        steps=np.array([line.step for line in steps], dtype=np.int64),
        spans=np.array([line.steps for line in steps], dtype=np.int64),
        epochs=np.array([line.epoch for line in steps], dtype=np.int64),
        windows=np.array([line.window for line in steps], dtype=np.int64),
        batches=[line.batches for line in steps],
        times=np.array([line.time for line in steps], dtype=np.float64),
        values=_columns([line.values for line in steps], known),
        weights=_columns([line.weights for line in steps], known),
        events=[line for line in lines if isinstance(line, EventLine)],
        settings=settings or {},
        facts=facts or {},
        notes=notes,
    )


def _status(lines: list[Line]) -> str:
    status = "not closed"
    for line in lines:
        if isinstance(line, HeaderLine):
            status = "not closed"
        elif isinstance(line, EventLine) and line.event == "closed":
            status = str(line.fields.get("status"))
    return status


def _gaps(lines: list[StepLine], begins: int) -> list[str]:
    """A sentence for each stretch of steps, after those before the run, that no line covers."""
    last, found = begins, []
    for line in lines:
        if line.step - line.steps > last:
            found.append(gap_text(last + 1, line.step - line.steps))
        last = line.step
    more = [f"and {len(found) - MAX_GAPS} more such gaps"] if len(found) > MAX_GAPS else []
    return found[:MAX_GAPS] + more


def _known(lines: list[StepLine], notes: list[str]) -> set[str]:
    """Names that are in the catalogue; a note on the others, which a newer or older version wrote."""
    known: set[str] = set()
    unknown: list[str] = []
    for name in dict.fromkeys(name for line in lines for name in line.values):
        try:
            find(name)
            known.add(name)
        except MetricError:
            unknown.append(name)
    if unknown:
        shown = ", ".join(unknown[:5]) + (", …" if len(unknown) > 5 else "")
        notes.append(f"{len(unknown)} metrics that this version does not know are left out ({shown})")
    return known


def _columns(rows: list[Mapping[str, float | None]], known: set[str]) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {}
    for position, row in enumerate(rows):
        for name in known & row.keys():
            if name not in columns:
                columns[name] = np.full(len(rows), np.nan)
            value = row[name]
            if value is not None:
                columns[name][position] = value
    return columns
