"""Checkpoints that appear whole: written aside, fsynced, renamed; then old ones are pruned.

A checkpoint is a directory ``checkpoints/step-00000100`` with ``drafter.safetensors`` (float32 masters under the names
of an exported drafter), ``state.pt`` (everything else that resume needs) and ``checkpoint.json``: the step, size and
SHA-256 of both files, what the run is (settings, drafter, fingerprints), versions, and what the trainer notes beside
(place in the plan, metrics).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoint.retention import Best, Candidate, kept
from paceline.checkpoint.run_directory import (
    CHECKPOINTS,
    EXPORTS,
    is_run_directory,
    read_evaluations,
    read_run_facts,
    read_run_settings,
    versions,
)
from paceline.config import settings_copy
from paceline.errors import CheckpointError
from paceline.types import differing_parts

WEIGHTS, STATE, NOTE = "drafter.safetensors", "state.pt", "checkpoint.json"
PREFIX, ASIDE, PRUNED, DAMAGED = "step-", ".part", ".old", ".damaged"
FORMAT = 1
IDENTITY = ("drafter", "data_fingerprint", "total_steps", "replicas")
"""Facts of a run, beside its target, that its checkpoints carry too; one with others belongs to another run."""


DECODED = {"decode/tau": "tau_micro", "decode/tau_macro": "tau_macro"}
"""Metrics that are known after the checkpoint, from evaluation.json, and their names there."""


def step_name(step: int) -> str:
    """Name of what belongs to a step."""
    return f"{PREFIX}{step:08d}"


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / CHECKPOINTS / step_name(step)


def export_path(run_dir: Path, step: int) -> Path:
    """Where the drafter folder lies that was exported with the checkpoint of a step."""
    return run_dir / EXPORTS / step_name(step)


def write_checkpoint(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: Best | None = None,
    note: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint, then prune.

    Args:
        run_dir: the run.
        step: optimizer steps done.
        state: of the learner; its entry ``network`` holds the drafter's tensors by name.
        keep_last: newest checkpoints to keep.
        keep_every: those whose step is a multiple of this are kept too.
        keep_best: the best by this metric is kept too, of those whose note has it under ``metrics`` or that were
            decoded with.
        note: plain values for ``checkpoint.json``.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: the disk is full or not writable; what was there stays as it was.
    """
    final = checkpoint_path(run_dir, step)
    if (final / NOTE).is_file():
        return final
    aside = final.with_name(final.name + ASIDE)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _write_files(aside, step, state, {**_of_run(run_dir), **(note or {})})
        shutil.rmtree(final, ignore_errors=True)
        aside.replace(final)
        _fsync(final.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        last = newest_step(run_dir)
        before = f"the checkpoint of step {last} is intact" if last else "no checkpoint was written before"
        raise CheckpointError(
            f"{final}: checkpoint not written ({_reason(error)}; {_room(run_dir)}); {before}; make room and run the "
            "same command to go on"
        ) from error
    _prune(run_dir, keep_last, keep_every, keep_best)
    return final


def _write_files(aside: Path, step: int, state: Mapping[str, Any], note: Mapping[str, Any]) -> None:
    rest = dict(state)
    network: dict[str, Tensor] = rest.pop("network")
    save_file({name: tensor.contiguous().cpu() for name, tensor in network.items()}, aside / WEIGHTS)
    with (aside / STATE).open("wb") as file:
        torch.save(rest, file)
    files = {}
    for name in (WEIGHTS, STATE):
        _fsync(aside / name)
        files[name] = {"bytes": (aside / name).stat().st_size, "sha256": _digest(aside / name)}
    text = json.dumps({**note, "format": FORMAT, "step": step, "files": files}, indent=1)
    (aside / NOTE).write_text(text + "\n", encoding="utf-8")
    _fsync(aside / NOTE)
    _fsync(aside)


def _of_run(run_dir: Path) -> dict[str, Any]:
    """What the checkpoints of a run carry of it."""
    run = {}
    if is_run_directory(run_dir):
        run = {"run": read_run_facts(run_dir), "settings": settings_copy(read_run_settings(run_dir))}
    return {**run, "versions": versions()}


def _reason(error: BaseException) -> str:
    """What the system said, where there is an error of the system behind this one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^Error while (de)?serializing: (I/O error: )?", "", line)


def _room(run_dir: Path) -> str:
    try:
        return f"{shutil.disk_usage(run_dir).free / 2**20:.0f} MiB free on this disk"
    except OSError as error:
        return f"{run_dir}: {error.strerror}"


def _prune(run_dir: Path, keep_last: int, keep_every: int | None, keep_best: Best | None) -> None:
    """Remove what need not be kept; renamed first, so that a kill in between leaves nothing that looks whole."""
    metric = keep_best.metric if keep_best is not None else None
    decoded = _decoded(run_dir, metric)
    candidates = [Candidate(step, decoded.get(step, _metric(run_dir, step, metric))) for step in steps(run_dir)]
    keep = kept(candidates, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    for step in sorted({candidate.step for candidate in candidates} - keep):
        path = checkpoint_path(run_dir, step)
        old = path.with_name(path.name + PRUNED)
        shutil.rmtree(old, ignore_errors=True)
        path.replace(old)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(export_path(run_dir, step), ignore_errors=True)


def _decoded(run_dir: Path, metric: str | None) -> dict[int, float]:
    """What decoding held-out prompts with a checkpoint gave, by step; empty for other metrics."""
    key = DECODED.get(metric or "")
    return {entry["step"]: entry[key] for entry in read_evaluations(run_dir)} if key else {}


def _metric(run_dir: Path, step: int, metric: str | None) -> float | None:
    if metric is None:
        return None
    try:
        value = read_note(run_dir, step).get("metrics", {}).get(metric)
    except CheckpointError:
        return None
    return float(value) if isinstance(value, (int, float)) else None


def steps(run_dir: Path) -> list[int]:
    """Steps of all whole checkpoints, ascending."""
    return [step for step in _named(run_dir) if (checkpoint_path(run_dir, step) / NOTE).is_file()]


def _named(run_dir: Path) -> list[int]:
    """Steps of all that has a checkpoint's name, ascending; one gets it whole, so what lacks a file has lost it."""
    folder = run_dir / CHECKPOINTS
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    found = (int(name.removeprefix(PREFIX)) for name in names if re.fullmatch(rf"{PREFIX}\d+", name))
    return sorted(step for step in found if checkpoint_path(run_dir, step).is_dir())


def newest_step(run_dir: Path) -> int:
    """Step of the newest whole checkpoint; 0 when there is none."""
    return max(steps(run_dir), default=0)


def being_written(run_dir: Path) -> set[str]:
    """Names of the checkpoints that are not whole yet: being written, or left so by a kill."""
    folder = run_dir / CHECKPOINTS
    return {path.name for path in folder.glob(f"{PREFIX}*{ASIDE}")} if folder.is_dir() else set()


def clear_unfinished(run_dir: Path) -> None:
    """Remove what a killed process left half written or half removed. Nobody else may be writing there."""
    folder = run_dir / CHECKPOINTS
    for path in folder.glob(f"{PREFIX}*") if folder.is_dir() else ():
        if path.name.endswith((ASIDE, PRUNED)):
            shutil.rmtree(path, ignore_errors=True)
    for path in (run_dir / EXPORTS).glob(f".{PREFIX}*") if (run_dir / EXPORTS).is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def resume_point(run_dir: Path) -> tuple[int, tuple[str, ...]]:
    """Where a run goes on: its newest checkpoint that is as it was written.

    Returns:
        Its step (0 where there is none at all), and one sentence for each newer one that is damaged.

    Raises:
        CheckpointError: there are checkpoints and all are damaged; one line that says how each is.
    """
    errors: dict[int, str] = {}
    for step in reversed(_named(run_dir)):
        error = damage_of(run_dir, step)
        if error is None:
            path, older = checkpoint_path(run_dir, step), reversed(errors.items())
            return step, tuple(
                f"{checkpoint_path(run_dir, bad)}: {text}; it is put aside as {path.with_name(step_name(bad)).name}"
                f"{DAMAGED} and the run goes on from step {step}"
                for bad, text in older
            )
        errors[step] = error
    if errors:
        told = ", ".join(f"{step_name(step)} {text}" for step, text in errors.items())
        raise CheckpointError(
            f"{run_dir / CHECKPOINTS}: no checkpoint can be used: {told}; put back a whole one, or give another run_dir"
        )
    return 0, ()


def quarantine_after(run_dir: Path, step: int) -> None:
    """Rename the checkpoints after a step, which `resume_point` found damaged, so that they do not count any more."""
    for later in _named(run_dir):
        if later > step:
            path = checkpoint_path(run_dir, later)
            aside = path.with_name(path.name + DAMAGED)
            shutil.rmtree(aside, ignore_errors=True)
            path.replace(aside)


def damage_of(run_dir: Path, step: int, files: Sequence[str] = (WEIGHTS, STATE)) -> str | None:
    """What is wrong with these files of a checkpoint, in words; None where they are as written, and this run's."""
    try:
        note = read_note(run_dir, step)
        if other := _origin_error(run_dir, note):
            return other
        for name in files:
            wanted, path = note["files"][name], checkpoint_path(run_dir, step) / name
            if path.stat().st_size != wanted["bytes"]:
                return f"damaged ({name} has {path.stat().st_size} bytes, {wanted['bytes']} were written)"
            if _digest(path) != wanted["sha256"]:
                return f"damaged ({name} is not what was written)"
    except CheckpointError as error:
        return str(error).partition(": ")[2]
    except (OSError, KeyError, TypeError, AttributeError) as error:
        return f"damaged ({_reason(error)})"
    return None


def _origin_error(run_dir: Path, note: Mapping[str, Any]) -> str | None:
    """What tells in words that a checkpoint was written by another run; None where it is this run's."""
    if not is_run_directory(run_dir):
        return None
    facts, carried = read_run_facts(run_dir), note.get("run", {})
    if parts := differing_parts(carried.get("target", {}), facts.get("target", {})):
        return f"written for another target than the run's; they differ in {', '.join(parts)}"
    others = [name.replace("_", " ") for name in IDENTITY if carried.get(name) != facts.get(name)]
    return f"written by another run; they differ in {', '.join(others)}" if others else None


def read_note(run_dir: Path, step: int) -> dict[str, Any]:
    """checkpoint.json of a checkpoint.

    Raises:
        CheckpointError: missing or damaged.
    """
    path = checkpoint_path(run_dir, step) / NOTE
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.parent}: damaged ({NOTE}: {_reason(error)})") from error
    if not isinstance(note, dict) or note.get("format") != FORMAT:
        raise CheckpointError(f"{path.parent}: damaged ({NOTE} is not of format {FORMAT})")
    return note


def read_checkpoint(run_dir: Path, step: int) -> dict[str, Any]:
    """The learner's state at a step, as it was given to `write_checkpoint`.

    Raises:
        CheckpointError: missing, damaged, or another run's.
    """
    folder = checkpoint_path(run_dir, step)
    if error := damage_of(run_dir, step):
        raise CheckpointError(f"{folder}: {error}; remove this checkpoint to go on from the one before")
    return _read_state(folder)


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        return {**state, "network": load_file(folder / WEIGHTS)}
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder}: cannot be read ({_reason(error)}); it was written otherwise") from error


def load_drafter(run_dir: Path, step: int | None = None) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    """The drafter of a run.

    Args:
        run_dir: the run.
        step: which checkpoint; None for the newest.

    Returns:
        The drafter's specification as a mapping, its float32 tensors by name, and the step.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        RunDirectoryError: there is no run.
    """
    facts = read_run_facts(run_dir)
    chosen = newest_step(run_dir) if step is None else step
    folder = checkpoint_path(run_dir, chosen)
    if not chosen or not (folder / NOTE).is_file():
        have = ", ".join(map(str, steps(run_dir))) or "none"
        raise CheckpointError(f"{run_dir}: no checkpoint of step {step or 'any'} (there are: {have}); train first")
    if error := damage_of(run_dir, chosen, [WEIGHTS]):
        raise CheckpointError(f"{folder}: {error}; choose another with --step, or run the training on")
    return facts["drafter"], load_file(folder / WEIGHTS), chosen


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
