"""Settings that change between two starts of a run: which may, from which step on they count, what they were before.

Every setting is one of three kinds. *Free* ones say where and how it is computed, and what is kept and shown. *Steered*
ones change what is learned from the next step on; each change is kept in ``changes.json``. All others are *fixed*: the
run is what it is by them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.atomic_files import write_text
from paceline.config import PlanConfig, Settings, absolute_paths, load_settings, named_values
from paceline.errors import RunDirectoryError
from paceline.text import parsed_json

CHANGES = "changes.json"
FREE = (
    *("flow", "checkpoint", "evaluate", "observe"),
    *("target.engine", "target.vllm_environment", "target.vllm_patience_s"),
    *(f"target.vllm.{name}" for name in ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager")),
    *(f"target.vllm.{name}" for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs")),
    *("target.path", "data.train", "data.heldout", "data.store", "data.workers", "data.verify"),
    *("drafter.attention", "drafter.head", "drafter.head_chunk", "drafter.positions_per_pass", "drafter.recompute"),
    *("drafter.diagnose_every", "drafter.diagnose_share", "optimizer.shard", "train.deterministic"),
)
"""Sections and keys that may change without a trace: fingerprints say whether files are the same wherever they are."""
STEERED = (
    *("plan", "objective", "train.epochs", "train.max_steps", "drafter.num_anchors", "drafter.noise"),
    *("optimizer.lr", "optimizer.schedule", "optimizer.warmup", "optimizer.final_lr", "optimizer.weight_decay"),
    *("optimizer.beta1", "optimizer.beta2", "optimizer.eps", "optimizer.momentum", "optimizer.clip_norm"),
    "optimizer.max_skipped_steps",
)
"""Sections and keys that may change from a step on."""
OF_PLAN = ("plan", "drafter.num_anchors")
"""Of these, what decides which samples a step holds."""

Kind = Literal["free", "steered", "fixed"]


def kind_of(name: str) -> Kind:
    """What a setting is, by its dotted name."""
    if _within(name, FREE):
        return "free"
    return "steered" if _within(name, STEERED) else "fixed"


def _within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


@dataclass(frozen=True, slots=True)
class PlanBefore:
    """How steps were planned before a change.

    Attributes:
        last_step: the last step that was planned so, 1-based.
        plan: the section of the settings.
        num_anchors: of `drafter.num_anchors`.
    """

    last_step: int
    plan: PlanConfig
    num_anchors: int


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """Settings that changed between two starts.

    Attributes:
        step: optimizer steps that had been taken; the change counts from the next one on.
        changed: dotted name → value before, value after.
        plan, num_anchors: before the change, where it changes the plan; else None.
        time: when the run was started with it, of ``time.time()``.
    """

    step: int
    changed: Mapping[str, tuple[Any, Any]]
    plan: Mapping[str, Any] | None = None
    num_anchors: int | None = None
    time: float = field(default_factory=time.time)

    @property
    def of_plan(self) -> bool:
        """Whether other samples go together from this step on."""
        return any(_within(name, OF_PLAN) for name in self.changed)

    def lines(self) -> list[str]:
        """One line for each setting: ``from step 121 on: optimizer.lr 0.0006 → 0.0003``."""
        at = f"from step {self.step + 1} on"
        return [f"{at}: {name} {before!r} → {after!r}" for name, (before, after) in self.changed.items()]


def change_asked(run_settings: Path, settings: Settings, step: int) -> SettingsChange:
    """What steered settings differ from those of the run's last start; `changed` is empty where none does.

    Args:
        run_settings: the settings file of the run.
        settings: of this start.
        step: optimizer steps that have been taken.
    """
    earlier = load_settings(run_settings)
    before, after = named_values(earlier), named_values(absolute_paths(settings))
    changed = {
        name: (before.get(name), after.get(name))
        for name in dict.fromkeys((*before, *after))
        if kind_of(name) == "steered" and before.get(name) != after.get(name)
    }
    found = SettingsChange(step, changed)
    if not found.of_plan:
        return found
    return SettingsChange(step, changed, earlier.plan.model_dump(mode="json"), earlier.drafter.num_anchors)


def read_changes(run_dir: Path) -> list[SettingsChange]:
    """The changes of a run, oldest first.

    Raises:
        RunDirectoryError: the file is damaged.
    """
    path = run_dir / CHANGES
    try:
        entries = parsed_json(path.read_text(encoding="utf-8"))
        return [_change(**entry) for entry in entries]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunDirectoryError(
            f"{path}: damaged ({error}); it says which steps were planned how: put it back, or start another run"
        ) from None


def _change(*, step: int, changed: Mapping[str, Any], **more: Any) -> SettingsChange:
    return SettingsChange(int(step), {name: (before, after) for name, (before, after) in changed.items()}, **more)


def add_change(run_dir: Path, change: SettingsChange) -> None:
    """Keep a change in the run directory."""
    entries = [asdict(known) for known in (*read_changes(run_dir), change)]
    write_text(run_dir / CHANGES, json.dumps(entries, indent=1) + "\n")


def plans_before(changes: list[SettingsChange]) -> list[PlanBefore]:
    """How steps were planned before the present settings, oldest first; steps of a change that was undone count once.

    A run that continued from an older checkpoint trains the steps between again, as they were planned the last time.
    """
    found: list[PlanBefore] = []
    for change in changes:
        if change.plan is None or change.num_anchors is None:
            continue
        plan, num_anchors = PlanConfig.model_validate(change.plan), change.num_anchors
        while found and found[-1].last_step >= change.step:
            # The steps behind this one are planned anew. What was in force before the first of the changes there stays.
            oldest = found.pop()
            plan, num_anchors = oldest.plan, oldest.num_anchors
        found.append(PlanBefore(change.step, plan, num_anchors))
    return [before for before in found if before.last_step]
