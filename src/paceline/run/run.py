"""A run as it is known before any model loads: what `build` makes, and what everything else in a run reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.changes import SettingsChange
from paceline.config import Settings
from paceline.data.store import TokenStore
from paceline.drafter.spec import DrafterSpec
from paceline.pipeline.multinode import ALONE, Nodes
from paceline.run.training_plan import TrainingPlan
from paceline.types import PlannedStep, TargetFacts


@dataclass(frozen=True)
class Run:
    """A run as it is known before any model loads.

    Attributes:
        settings: resolved.
        run_dir: its directory.
        facts, taps, spec: of target and drafter.
        source: the tokenized data.
        heldout: the tokenized held-out samples, where there are any to validate on.
        plan: its optimizer steps and their micro-batches.
        first_step: steps that are taken, in this run or in the one that it was taken over from.
        nodes: the machines that train it together, seen from this one.
        damaged: a sentence for each newer checkpoint that is not as it was written.
        change: settings that count from this start on; None where none changed.
    """

    settings: Settings
    run_dir: Path
    facts: TargetFacts
    taps: list[int]
    spec: DrafterSpec
    source: TokenStore
    heldout: TokenStore | None
    plan: TrainingPlan
    first_step: int
    nodes: Nodes = ALONE
    damaged: tuple[str, ...] = ()
    change: SettingsChange | None = None

    @property
    def num_ranks(self) -> int:
        """Drafter ranks of all machines."""
        return self.nodes.here.count * len(self.settings.flow.drafter_devices)

    @property
    def local_ranks(self) -> range:
        """Drafter ranks of this machine."""
        count = len(self.settings.flow.drafter_devices)
        return range(self.nodes.here.number * count, (self.nodes.here.number + 1) * count)

    @property
    def steps(self) -> list[PlannedStep]:
        """Every optimizer step of the run."""
        return self.plan.steps

    @property
    def remaining(self) -> list[PlannedStep]:
        """Steps still to take."""
        return [planned for planned in self.steps if planned.step > self.first_step]
