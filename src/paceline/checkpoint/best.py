"""The best checkpoint of a run: by `checkpoint.keep_best`, or where that is unset by τ on held-out samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import checkpoints
from paceline.checkpoint.retention import Best, Candidate, best_candidate
from paceline.errors import CheckpointError, PacelineError
from paceline.text import fixed

HELD_OUT_TAU = Best("validation/tau", "higher")
DECODED_TAU = Best("decode/tau", "higher")


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The best of the checkpoints that a run keeps.

    Attributes:
        step: optimizer steps that it holds.
        metric: by which it is the best.
        value: of the metric.
    """

    step: int
    metric: str
    value: float

    def __str__(self) -> str:
        return f"step {self.step} ({self.metric} {fixed(self.value, 3)})"


def note_of(best: Best | None, values: dict[str, float]) -> dict[str, Any]:
    """What checkpoint.json has of this: how the best is found, and what was measured for this checkpoint."""
    return {"best_by": None if best is None else asdict(best), "metrics": values}


def best_checkpoint(run_dir: Path) -> BestCheckpoint | None:
    """The best checkpoint of a run; None where none was measured, or where nothing can be read."""
    try:
        newest = checkpoints.newest_step(run_dir)
        by = checkpoints.read_note(run_dir, newest).get("best_by") if newest else None
        ways = [DECODED_TAU, HELD_OUT_TAU] if by is None else [Best(**by)]
        found = [(way, checkpoints.candidates(run_dir, way.metric)) for way in ways]
    except PacelineError:
        return None
    way, measured = max(found, key=lambda pair: _num_measured(pair[1]))
    best = best_candidate(measured, way)
    return None if best is None or best.value is None else BestCheckpoint(best.step, way.metric, best.value)


def best_step(run_dir: Path) -> int:
    """Step of the best checkpoint.

    Raises:
        CheckpointError: none was measured.
    """
    best = best_checkpoint(run_dir)
    if best is None:
        raise CheckpointError(
            f"{run_dir}: no checkpoint was measured on held-out samples, so none is the best; choose one with --step"
        )
    return best.step


def _num_measured(found: list[Candidate]) -> int:
    return sum(candidate.value is not None for candidate in found)
