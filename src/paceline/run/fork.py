"""A new run that continues from a checkpoint of another: weights, optimizer state, step and place in the epoch.

Where data and fixed settings stay, the new run is the old one from there on, with other steered settings. Where they do
not, it is another run, which begins at that step with those weights and moments whose shapes are its own.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.atomic_files import make_folder, replacing, write_text
from paceline.checkpoint import checkpoints, run_directory
from paceline.checkpoint.changes import CHANGES, change_asked, read_changes
from paceline.config import Settings, absolute_paths, dump_settings
from paceline.data.store import open_store
from paceline.errors import CheckpointError, RunDirectoryError
from paceline.run.build import resolve_models, step_after
from paceline.run.warm_start import FORKED, check_init, init_lines
from paceline.text import masked

LINES = ("metrics.jsonl", "micro_batches.jsonl")
"""Copied whole; the new run's first start takes off what is behind its step."""


def fork_run(run_dir: Path, settings: Settings, step: int) -> list[str]:
    """Make the directory of a new run, which appears whole.

    Args:
        run_dir: of the run that is forked; it stays as it is.
        settings: of the new run, its directory in `settings.run_dir`.
        step: of a checkpoint that is kept.

    Returns:
        A line for each setting that changes, and for what is not carried over.

    Raises:
        RunDirectoryError: the new directory is taken.
        CheckpointError: no such checkpoint, or it is damaged.
        ConfigError: another target or vocabulary, into which no tensor fits.
    """
    out = Path(settings.run_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunDirectoryError(f"{out}: is there already; give --out another name")
    if step not in checkpoints.steps(run_dir):
        kept = ", ".join(map(str, checkpoints.steps(run_dir))) or "none"
        raise CheckpointError(f"{run_dir}: no checkpoint of step {step}; kept are {kept}")
    if error := checkpoints.damage_of(run_dir, step):
        raise CheckpointError(f"{checkpoints.checkpoint_path(run_dir, step)}: {error}; fork from another step")
    old = run_directory.read_run_settings(run_dir)
    fixed = run_directory.fixed_changes(run_dir, settings)
    of_data = {name for name in fixed if name.startswith("data.")}
    if settings.data.train != old.data.train:
        fixed["data.train"] = (old.data.train, settings.data.train)
        of_data.add("data.train")
    moved = settings.data.store != old.data.store
    if moved and settings.store_path.is_dir():
        known = run_directory.read_run_facts(run_dir)["data_fingerprint"]
        moved = open_store(settings.store_path).fingerprint != known
    if not (moved or fixed):
        return _continued(run_dir, old, settings, step)
    if not (moved or of_data):
        data = settings.data.model_copy(update={"store": str(old.store_path.absolute())})
        settings = settings.model_copy(update={"data": data})
    elif not moved:  # other rows or another rendering: the new run makes its own store of them
        settings = settings.model_copy(update={"data": settings.data.model_copy(update={"store": None})})
    return _begun(run_dir, old, settings, step, fixed, other_data=bool(moved or of_data))


def _continued(run_dir: Path, old: Settings, settings: Settings, step: int) -> list[str]:
    """The old run from this step on, with other steered settings."""
    out = Path(settings.run_dir)
    change = change_asked(run_dir / run_directory.SETTINGS, settings, step)
    # Of a change behind this step nothing was trained: what was in force before counts up to here.
    changes = [replace(known, step=min(known.step, step)) for known in read_changes(run_dir)]
    facts = {**run_directory.read_run_facts(run_dir), "forked_from": _origin(run_dir, step)}
    data = settings.data.model_copy(update={"store": str(old.store_path.absolute())})
    make_folder(out.parent)
    with replacing(out) as aside:
        aside.mkdir()
        _write_run(aside, out, facts, settings.model_copy(update={"data": data}))
        entries = [asdict(known) for known in (*changes, *([change] if change.changed else []))]
        write_text(aside / CHANGES, json.dumps(entries, indent=1) + "\n")
        _copy_checkpoint(run_dir, aside, step)
        for name in LINES:
            if (run_dir / name).is_file():
                shutil.copyfile(run_dir / name, aside / name)
        for kind in ("evaluations", "others", "servers"):
            for entry in run_directory.read_evaluations(run_dir, kind):
                if entry["step"] <= step:
                    run_directory.add_evaluation(aside, entry["step"], entry, kind)
    return change.lines()


def _begun(
    run_dir: Path, old: Settings, settings: Settings, step: int, fixed: dict[str, tuple[Any, Any]], *, other_data: bool
) -> list[str]:
    """Another run, which begins at this step."""
    out, epoch = Path(settings.run_dir).absolute(), 0
    if not other_data:
        after = step_after(old, step)
        epoch = old.train.epochs if after is None else after.epoch
    drafter = settings.drafter.model_copy(
        update={"init": str(checkpoints.checkpoint_path(out / FORKED, step)), "init_step": step, "init_epoch": epoch}
    )
    begins = {"step": step, "epoch": epoch}
    facts = {"forked_from": _origin(run_dir, step), "begins": begins}
    make_folder(out.parent)
    with replacing(out) as aside:
        aside.mkdir()
        _write_run(aside, out, facts, settings.model_copy(update={"drafter": drafter}))
        _copy_checkpoint(run_dir, aside / FORKED, step)
        here = drafter.model_copy(update={"init": str(checkpoints.checkpoint_path(aside / FORKED, step))})
        noted = check_init(settings.model_copy(update={"drafter": here}), resolve_models(settings).spec)
    lines = [f"from step {step + 1} on: {name} {before!r} → {after!r}" for name, (before, after) in fixed.items()]
    if other_data:
        lines.append(f"other data: a new epoch count begins, step {step + 1} is the first of epoch 1")
    else:
        lines.append(f"step {step + 1} is the first of epoch {epoch + 1}, which is planned anew from its beginning")
    return [*lines, *init_lines(noted)[1:]]


def _origin(run_dir: Path, step: int) -> dict[str, Any]:
    return {"run": str(run_dir.absolute()), "step": step}


def _write_run(aside: Path, out: Path, facts: dict[str, Any], settings: Settings) -> None:
    text = dump_settings(absolute_paths(settings).model_copy(update={"run_dir": str(out.absolute())}))
    write_text(aside / run_directory.RUN, json.dumps(facts, indent=2) + "\n")
    write_text(aside / run_directory.SETTINGS, text, private=masked(text) != text)


def _copy_checkpoint(run_dir: Path, to: Path, step: int) -> None:
    place = checkpoints.checkpoint_path(to, step)
    place.parent.mkdir(parents=True)
    shutil.copytree(checkpoints.checkpoint_path(run_dir, step), place)
