"""A new run that continues from a checkpoint of another: weights, optimizer state, step and place in the epoch."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from paceline.atomic_files import replacing, write_text
from paceline.checkpoint import checkpoints, run_directory
from paceline.checkpoint.changes import CHANGES, change_asked, read_changes
from paceline.config import Settings, dump_settings
from paceline.errors import CheckpointError, RunDirectoryError
from paceline.text import masked

METRICS = "metrics.jsonl"
"""Copied whole; the new run's first start takes off what is behind its step."""


def fork_run(run_dir: Path, settings: Settings, step: int) -> list[str]:
    """Make the directory of a new run, which appears whole.

    The new run reads the store of the old one. Steered settings that differ count from the next step on.

    Args:
        run_dir: of the run that is forked; it stays as it is.
        settings: of the new run, its directory in `settings.run_dir`.
        step: of a checkpoint that is kept.

    Returns:
        A line for each setting that changes.

    Raises:
        RunDirectoryError: settings that no fork may change; or the new directory is taken.
        CheckpointError: no such checkpoint, or it is damaged.
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
    run_directory.check_run(settings.model_copy(update={"run_dir": str(run_dir)}))
    change = change_asked(run_dir / run_directory.SETTINGS, settings, step)
    # Of a change behind this step nothing was trained: what was in force before counts up to here.
    changes = [replace(known, step=min(known.step, step)) for known in read_changes(run_dir)]
    facts = {**run_directory.read_run_facts(run_dir), "forked_from": {"run": str(run_dir.absolute()), "step": step}}
    data = settings.data.model_copy(update={"store": str(old.store_path.absolute())})
    text = dump_settings(settings.model_copy(update={"data": data, "run_dir": str(out.absolute())}))
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as aside:
        aside.mkdir()
        write_text(aside / run_directory.RUN, json.dumps(facts, indent=2) + "\n")
        write_text(aside / run_directory.SETTINGS, text, private=masked(text) != text)
        entries = [asdict(known) for known in (*changes, *([change] if change.changed else []))]
        write_text(aside / CHANGES, json.dumps(entries, indent=1) + "\n")
        place = checkpoints.checkpoint_path(aside, step)
        place.parent.mkdir()
        shutil.copytree(checkpoints.checkpoint_path(run_dir, step), place)
        if (run_dir / METRICS).is_file():
            shutil.copyfile(run_dir / METRICS, aside / METRICS)
        for kind in ("evaluations", "others", "servers"):
            for entry in run_directory.read_evaluations(run_dir, kind):
                if entry["step"] <= step:
                    run_directory.add_evaluation(aside, entry["step"], entry, kind)
    return change.lines()
