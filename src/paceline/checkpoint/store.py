"""Checkpoints that appear whole: written aside, fsynced, renamed; then old ones are pruned.

A checkpoint is a directory ``checkpoints/step-00000100`` with ``drafter.safetensors`` (float32 masters under the names
of an exported drafter), ``state.pt`` (everything else that resume needs) and ``checkpoint.json``.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoint.rundir import CHECKPOINTS, RUN, read_run_facts
from paceline.contracts import differing_parts
from paceline.errors import CheckpointError

WEIGHTS, STATE, NOTE = "drafter.safetensors", "state.pt", "checkpoint.json"
PREFIX, ASIDE = "step-", ".part"


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / CHECKPOINTS / f"{PREFIX}{step:08d}"


def write_checkpoint(run_dir: Path, step: int, state: dict[str, Any], *, keep_last: int) -> Path:
    """Write a checkpoint, then prune.

    Args:
        run_dir: the run.
        step: optimizer steps done.
        state: of the learner; its entry ``network`` holds the drafter's tensors by name.
        keep_last: newest checkpoints to keep.

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
        rest = dict(state)
        network: dict[str, Tensor] = rest.pop("network")
        save_file({name: tensor.contiguous().cpu() for name, tensor in network.items()}, aside / WEIGHTS)
        torch.save(rest, aside / STATE)
        note = {"step": step, "target": _target_of(run_dir)}
        (aside / NOTE).write_text(json.dumps(note) + "\n", encoding="utf-8")
        for path in aside.iterdir():
            _fsync(path)
        shutil.rmtree(final, ignore_errors=True)
        aside.replace(final)
        _fsync(final.parent)
    except (OSError, RuntimeError, SafetensorError) as fault:
        shutil.rmtree(aside, ignore_errors=True)
        last = newest_step(run_dir)
        kept = f"the checkpoint of step {last} is intact" if last else "no checkpoint was written before"
        room = f"{shutil.disk_usage(final.parent).free / 2**20:.0f} MiB free on this disk"
        raise CheckpointError(
            f"{final}: checkpoint not written ({str(fault).splitlines()[0]}; {room}); {kept}; make room and run the "
            "same command to go on"
        ) from fault
    for old in steps(run_dir)[:-keep_last]:
        shutil.rmtree(checkpoint_path(run_dir, old), ignore_errors=True)
    return final


def steps(run_dir: Path) -> list[int]:
    """Steps of all whole checkpoints, ascending."""
    folder = run_dir / CHECKPOINTS
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir() and (path / NOTE).is_file()]
    return sorted(
        int(name.removeprefix(PREFIX)) for name in names if name.startswith(PREFIX) and not name.endswith(ASIDE)
    )


def newest_step(run_dir: Path) -> int:
    """Step of the newest whole checkpoint; 0 when there is none."""
    return max(steps(run_dir), default=0)


def read_checkpoint(run_dir: Path, step: int) -> dict[str, Any]:
    """The learner's state at a step, as it was given to `write_checkpoint`.

    Raises:
        CheckpointError: missing, damaged, or of a run with another target.
    """
    folder = checkpoint_path(run_dir, step)
    _check_origin(run_dir, folder)
    try:
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        return {**state, "network": load_file(folder / WEIGHTS)}
    except (OSError, RuntimeError, EOFError, SafetensorError) as fault:
        raise CheckpointError(
            f"{folder}: cannot be read ({fault}); remove this checkpoint to go on from the one before"
        ) from fault


def load_drafter(run_dir: Path, step: int | None = None) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    """The drafter of a run.

    Args:
        run_dir: the run.
        step: which checkpoint; None for the newest.

    Returns:
        The drafter's specification as a mapping, its float32 tensors by name, and the step.

    Raises:
        CheckpointError: there is no such checkpoint.
        RunDirectoryError: there is no run.
    """
    facts = read_run_facts(run_dir)
    chosen = newest_step(run_dir) if step is None else step
    folder = checkpoint_path(run_dir, chosen)
    if not chosen or not (folder / NOTE).is_file():
        have = ", ".join(map(str, steps(run_dir))) or "none"
        raise CheckpointError(f"{run_dir}: no checkpoint of step {step or 'any'} (there are: {have}); train first")
    try:
        return facts["drafter"], load_file(folder / WEIGHTS), chosen
    except (OSError, SafetensorError) as fault:
        raise CheckpointError(f"{folder / WEIGHTS}: cannot be read ({fault})") from fault


def _target_of(run_dir: Path) -> dict[str, str]:
    """Identity of the run's target; empty where nothing says what the run is."""
    return read_run_facts(run_dir).get("target", {}) if (run_dir / RUN).is_file() else {}


def _check_origin(run_dir: Path, folder: Path) -> None:
    """Refuse a checkpoint that was written for another target."""
    try:
        written = json.loads((folder / NOTE).read_text(encoding="utf-8")).get("target", {})
    except (OSError, ValueError, AttributeError) as fault:
        raise CheckpointError(f"{folder / NOTE}: cannot be read ({fault}); remove this checkpoint") from fault
    if parts := differing_parts(written, _target_of(run_dir)):
        raise CheckpointError(
            f"{folder}: written for another target than the run's; they differ in {', '.join(parts)}; "
            "put back the run's own checkpoint, or remove this one"
        )


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
