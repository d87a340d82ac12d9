"""Checkpoints that appear whole: written aside, flushed to the disk, renamed; then old ones are pruned.

A checkpoint is a directory ``checkpoints/step-00000100`` with ``drafter.safetensors`` (float32 masters under the names
of an exported drafter), ``state.pt`` (everything else that resume needs) and ``checkpoint.json``: the step, size and
SHA-256 of both files, what the run is (settings, drafter, fingerprints), versions, and what the trainer notes beside
(place in the plan, metrics). The last line of checkpoint.json is its own SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.atomic_files import ASIDE, make_folder, remove, replacing
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
from paceline.checkpoint.run_files import RunFiles
from paceline.config import CheckpointConfig, settings_copy
from paceline.errors import CheckpointError, PacelineError, RunDirectoryError
from paceline.text import first_line, parsed_json, size
from paceline.types import differing_parts

WEIGHTS, STATE, NOTE = "drafter.safetensors", "state.pt", "checkpoint.json"
FILES = (WEIGHTS, STATE)
UNSIGNED = "0" * 64
"""Stands for the SHA-256 of checkpoint.json while that is taken of its own text."""
PREFIX, PRUNED, DAMAGED = "step-", ".old", ".damaged"
FORMAT = 2
IDENTITY = ("drafter", "data_fingerprint", "replicas")
"""Facts of a run, beside its target, that its checkpoints carry too; one with others belongs to another run."""

DECODED = {"decode/tau": "tau_micro", "decode/tau_macro": "tau_macro"}
"""Metrics that are known after the checkpoint, from evaluation.json, and their names there."""


def step_name(step: int) -> str:
    """Name of what belongs to a step."""
    return f"{PREFIX}{step:08d}"


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return run_dir / CHECKPOINTS / step_name(step)


def export_path(run_dir: Path, step: int) -> Path:
    """The drafter folder that is exported with the checkpoint of a step."""
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
    try:
        make_folder(final.parent)
        with replacing(final) as aside:
            aside.mkdir()
            _write_files(aside, step, state, {**_of_run(run_dir), **(note or {})})
    except (OSError, RuntimeError, SafetensorError) as error:
        last = newest_step(run_dir)
        before = f"the checkpoint of step {last} is intact" if last else "no checkpoint was written before"
        raise CheckpointError(
            f"{final}: checkpoint not written ({_reason(error)}; {_room(run_dir)}); {before}; make room and run the "
            "same command to resume"
        ) from error
    _prune(run_dir, keep_last, keep_every, keep_best)
    return final


def _write_files(aside: Path, step: int, state: Mapping[str, Any], note: Mapping[str, Any]) -> None:
    rest = dict(state)
    network: dict[str, Tensor] = rest.pop("network")
    save_file({name: tensor.contiguous().cpu() for name, tensor in network.items()}, aside / WEIGHTS)
    with (aside / STATE).open("wb") as file:
        torch.save(rest, file)
    files = {name: {"bytes": (aside / name).stat().st_size, "sha256": _digest(aside / name)} for name in FILES}
    text = json.dumps({**note, "format": FORMAT, "step": step, "files": files, "sha256": UNSIGNED}, indent=1) + "\n"
    before, _, after = text.rpartition(UNSIGNED)
    (aside / NOTE).write_text(before + hashlib.sha256(text.encode()).hexdigest() + after, encoding="utf-8")


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
    return re.sub(r"^Error while (de)?serializing: (I/O error: )?", "", first_line(error))


def _room(run_dir: Path) -> str:
    try:
        return f"{size(shutil.disk_usage(run_dir).free)} free on this disk"
    except OSError as error:
        return f"{run_dir}: {error.strerror}"


def _prune(run_dir: Path, keep_last: int, keep_every: int | None, keep_best: Best | None) -> None:
    """Remove what need not be kept; renamed first, so that a kill in between leaves nothing that looks whole."""
    found = candidates(run_dir, keep_best.metric if keep_best is not None else None)
    keep = kept(found, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    for step in sorted({candidate.step for candidate in found} - keep):
        path = checkpoint_path(run_dir, step)
        old = path.with_name(path.name + PRUNED)
        try:
            remove(old)
            path.replace(old)
            remove(old)
            remove(export_path(run_dir, step))
        except OSError as error:
            raise CheckpointError(
                f"{path}: this old checkpoint cannot be removed ({_reason(error)}); the newest one is whole; remove "
                "this one, or raise checkpoint.keep_last, and run the same command to resume"
            ) from error


def candidates(run_dir: Path, metric: str | None) -> list[Candidate]:
    """All whole checkpoints by ascending step, with what was measured for each."""
    decoded = _decoded(run_dir, metric)
    return [Candidate(step, decoded.get(step, _metric(run_dir, step, metric))) for step in steps(run_dir)]


def _decoded(run_dir: Path, metric: str | None) -> dict[int, float]:
    """What decoding held-out prompts with a checkpoint gave, by step; empty for other metrics."""
    key = DECODED.get(metric or "")
    found = ((entry["step"], entry.get(key)) for entry in read_evaluations(run_dir)) if key else ()
    return {step: float(value) for step, value in found if isinstance(value, (int, float))}


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
    for folder in (run_dir / CHECKPOINTS, run_dir / EXPORTS):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name.endswith((ASIDE, PRUNED)) or path.name.startswith(f".{PREFIX}"):
                remove(path)


def resume_point(run_dir: Path) -> tuple[int, tuple[str, ...]]:
    """Where a run continues: its newest checkpoint that is as it was written.

    Returns:
        Its step (0 where there is none at all), and one sentence for each newer one that is damaged.

    Raises:
        CheckpointError: there are checkpoints and all are damaged; one line that says how each is.
    """
    errors: dict[int, str] = {}
    for step in reversed(_named(run_dir)):
        error = damage_of(run_dir, step)
        if error is None:
            older = reversed(errors.items())
            return step, tuple(
                f"{checkpoint_path(run_dir, bad)}: {text}; it is renamed to {step_name(bad)}{DAMAGED}, and the run "
                f"continues from step {step}"
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
            remove(aside)
            path.replace(aside)


def damage_of(run_dir: Path, step: int, files: Sequence[str] = FILES) -> str | None:
    """What is wrong with these files of a checkpoint; None where they are as written, and this run's."""
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
    except OSError as error:
        return f"damaged ({_reason(error)})"
    return None


def _origin_error(run_dir: Path, note: Mapping[str, Any]) -> str | None:
    """What shows that a checkpoint was written by another run; None where it is this run's."""
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
        text = path.read_text(encoding="utf-8")
        before, last, after = text.rpartition('"sha256": "')
        if hashlib.sha256((before + last + UNSIGNED + after[64:]).encode()).hexdigest() != after[:64]:
            raise ValueError("not what was written")
        note = parsed_json(text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.parent}: damaged ({NOTE}: {_reason(error)})") from error
    if note["format"] != FORMAT:
        raise CheckpointError(f"{path.parent}: damaged ({NOTE} is not of format {FORMAT})")
    return note


def read_checkpoint(run_dir: Path, step: int) -> dict[str, Any]:
    """The learner's state at a step, as it was given to `write_checkpoint`.

    Raises:
        CheckpointError: missing, damaged, or another run's.
    """
    folder = checkpoint_path(run_dir, step)
    if error := damage_of(run_dir, step):
        raise CheckpointError(f"{folder}: {error}; remove this checkpoint to resume from the one before")
    return _read_state(folder)


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        return {**state, "network": load_file(folder / WEIGHTS)}
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{folder}: cannot be read ({_reason(error)}), though its bytes are as written"
        ) from error


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
        if not (have := steps(run_dir)):
            raise CheckpointError(f"{run_dir}: no checkpoint yet; train first")
        raise CheckpointError(
            f"{run_dir}: no checkpoint of step {chosen}; there are: {', '.join(map(str, have))}; give one of them, or "
            "leave out --step for the newest"
        )
    if error := damage_of(run_dir, chosen, [WEIGHTS]):
        raise CheckpointError(f"{folder}: {error}; choose another with --step, or train on")
    return facts["drafter"], load_file(folder / WEIGHTS), chosen


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class CheckpointWriter:
    """Writes the checkpoints of a run in the background, one at a time; pickles as long as it has written nothing.

    Training stops only while the state is copied.

    Args:
        run_dir: the run.
        config: how much is kept.
        best: how the best is found, where it is kept.
        export: writes the drafter folder of a step from its tensors, once the checkpoint is there.
    """

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        *,
        best: Best | None = None,
        export: Callable[[int, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._run_dir, self._config, self._best = run_dir, config, best
        self._files = RunFiles.of(run_dir)
        self._export = export
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._newest: int | None = None

    def put(self, step: int, state: Mapping[str, Any], note: Mapping[str, Any]) -> None:
        """Begin to write; waits only where the write before is not done. A step that was put before is left alone.

        Args:
            step: optimizer steps done.
            state: a copy of the learner's, whose tensors nobody changes before `wait` has returned (`Learner.save`).
            note: further plain values for ``checkpoint.json``.

        Raises:
            PacelineError: the write before failed.
        """
        self.wait()
        if step == self._newest:
            return
        if self._newest is None:
            clear_unfinished(self._run_dir)
        self._newest = step
        arguments = (step, state, note)
        self._thread = threading.Thread(target=self._write, args=arguments, name="paceline checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Never waits.

        Raises:
            PacelineError: a write has failed since the last look.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Until everything is on disk.

        Raises:
            PacelineError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, step: int, state: Mapping[str, Any], note: Mapping[str, Any]) -> None:
        try:
            if (lost := self._files.lost()) is not None:
                raise self._rescued(lost, step, state, note)
            try:
                self._write_into(self._run_dir, step, state, note)
                if self._export is not None:
                    self._export(step, state["network"])
            except PacelineError:
                if (lost := self._files.lost()) is not None:  # while it was being written
                    raise self._rescued(lost, step, state, note) from None
                raise
        except Exception as error:  # noqa: BLE001 - raised by the next look
            self._error = error

    def _write_into(self, run_dir: Path, step: int, state: Mapping[str, Any], note: Mapping[str, Any]) -> None:
        config = self._config
        write_checkpoint(
            run_dir,
            step,
            state,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            keep_best=self._best,
            note=note,
        )

    def _rescued(self, lost: str, step: int, state: Mapping[str, Any], note: Mapping[str, Any]) -> RunDirectoryError:
        """Write the state elsewhere; the error that says what happened and where the state is."""
        try:
            folder = self._files.rescue()
            self._write_into(folder, step, state, note)
        except CheckpointError as error:
            return RunDirectoryError(f"{lost}, and {error}; the state of step {step} is lost")
        return RunDirectoryError(
            f"{lost}; the state of step {step} is in {folder}, resume with: paceline train {folder}"
        )
