"""The run directory: what a run is, and whether a second start is the same run.

Layout: ``settings.yaml`` (resolved), ``run.json`` (versions, fingerprints, drafter), ``changes.json`` (settings that
changed on the way), ``store/``, ``metrics.jsonl``,
``checkpoints/step-00000100/``, ``evaluation.json``, ``export/``, ``report.html``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.atomic_files import make_folder, write_text
from paceline.checkpoint.changes import FREE, STEERED, add_change, change_asked, kind_of
from paceline.config import Settings, absolute_paths, dump_settings, load_settings, named_values
from paceline.errors import ConfigError, RunDirectoryError
from paceline.text import absent, masked, parsed_json
from paceline.types import differing_parts
from paceline.version import __version__

SETTINGS, RUN, CHECKPOINTS, EVALUATION = "settings.yaml", "run.json", "checkpoints", "evaluation.json"
EXPORTS = "export"

STEERED_FACTS = ("total_steps", "engine")
"""Facts that follow from settings that may change; of the engine, its version too."""
OF_SETTINGS = ("drafter", "init")
"""Facts that follow from settings: where those have changed, they are not separate errors."""


def is_run_directory(path: Path) -> bool:
    """Whether a run was started there."""
    return (path / SETTINGS).is_file() and (path / RUN).is_file()


def read_run_settings(run_dir: Path, overrides: Mapping[str, str] | None = None) -> Settings:
    """Resolved settings of a run, overridden by dotted flags.

    Raises:
        RunDirectoryError: no run was started there.
        ConfigError: the flags cannot be used, or ask for another directory.
    """
    if not is_run_directory(run_dir):
        raise RunDirectoryError(
            f"{run_dir}: no run here ({SETTINGS} and {RUN} are missing); give a run directory or a settings file"
        )
    asked = (overrides or {}).get("run_dir")
    if asked is not None and Path(asked).resolve() != run_dir.resolve():
        raise ConfigError(
            f"run_dir: asked for {asked}, but the run {run_dir} was given; for a new run give its settings, "
            f"{run_dir / SETTINGS}"
        )
    settings = load_settings(run_dir / SETTINGS, overrides)
    return settings.model_copy(update={"run_dir": str(run_dir)})


def read_run_facts(run_dir: Path) -> dict[str, Any]:
    """run.json of a run.

    Raises:
        RunDirectoryError: missing or damaged.
    """
    path = run_dir / RUN
    try:
        facts = parsed_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunDirectoryError(f"{run_dir}: no run here ({RUN} is missing); give a run directory") from None
    except ValueError as error:
        raise RunDirectoryError(f"{path}: damaged ({error}); start the run in a new directory") from None
    if not isinstance(facts, dict):
        raise RunDirectoryError(f"{path}: damaged (no facts by name); start the run in a new directory")
    return facts


def open_run(settings: Settings, facts: Mapping[str, Any], step: int = 0) -> Path:
    """Make the run directory, or check that it is this run's, and keep what changes from now on.

    Args:
        settings: resolved settings.
        facts: what else makes the run what it is: ``drafter``, ``target`` (its identity, part by part),
            ``data_fingerprint``, …
        step: optimizer steps that have been taken.

    Returns:
        The directory.

    Raises:
        RunDirectoryError: it belongs to another configuration (each difference in a line) or is something else.
    """
    try:
        return _open(Path(settings.run_dir), settings, {**json.loads(json.dumps(facts)), "versions": versions()}, step)
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise _unwritable(Path(settings.run_dir), error) from error


def check_run(settings: Settings, facts: Mapping[str, Any] | None = None) -> None:
    """As `open_run`, but nothing is written.

    Args:
        settings: resolved settings.
        facts: those of `open_run` that are known.

    Raises:
        RunDirectoryError: see `open_run`.
    """
    run_dir = Path(settings.run_dir)
    if is_run_directory(run_dir):
        changed = list(_changed_settings(run_dir, settings))
        known = {name: fact for name, fact in (facts or {}).items() if not changed or name not in OF_SETTINGS}
        errors = [*changed, *_changed_facts(run_dir, json.loads(json.dumps(known)))]
        if errors:
            raise RunDirectoryError(*errors)
        return
    if run_dir.is_symlink() and not run_dir.exists():
        raise _dangling(run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise RunDirectoryError(f"{run_dir}: is a file; give run_dir another name")
    names = sorted(path.name for path in run_dir.iterdir()) if run_dir.is_dir() else []
    strangers = [name for name in names if not name.lstrip(".").startswith("store")]
    if strangers:
        raise RunDirectoryError(
            f"{run_dir}: not empty and no run of paceline ({', '.join(strangers[:4])}); give run_dir another name"
        )


def check_writable(run_dir: Path) -> None:
    """Refuse a directory in which nothing can be written, before any work is done for it.

    Raises:
        RunDirectoryError: it, or the folder that it would be made in, takes no files.
    """
    place = run_dir
    while not place.exists() and place != place.parent:
        if place.is_symlink():
            raise _dangling(place)
        place = place.parent
    if not place.is_dir():
        raise RunDirectoryError(f"{place}: is a file; give run_dir another name")
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"paceline")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(run_dir, error) from error


def _dangling(path: Path) -> RunDirectoryError:
    return RunDirectoryError(f"{path}: {absent(path, 'folder')}; make that folder, or give another run_dir")


def _unwritable(run_dir: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"{run_dir}: cannot be written ({error.strerror or error}); free space, repair it, or give another run_dir"
    )


def _open(run_dir: Path, settings: Settings, facts: Mapping[str, Any], step: int) -> Path:
    check_run(settings, facts)
    if is_run_directory(run_dir):
        change = change_asked(run_dir / SETTINGS, settings, step)
        if change.changed and step:
            add_change(run_dir, change)
        known = read_run_facts(run_dir)
        now = {**facts, **known, **{name: facts[name] for name in STEERED_FACTS if name in facts}}
        if now != known:
            write_text(run_dir / RUN, json.dumps(now, indent=2) + "\n")
        _write_settings(run_dir, settings)
        return run_dir
    make_folder(run_dir)
    write_text(run_dir / RUN, json.dumps(facts, indent=2) + "\n")
    _write_settings(run_dir, settings)
    return run_dir


def _write_settings(run_dir: Path, settings: Settings) -> None:
    """The run's settings, for the next start, with absolute paths.

    A file that holds a password or a key can be read by its owner only.
    """
    text = dump_settings(absolute_paths(settings))
    write_text(run_dir / SETTINGS, text, private=masked(text) != text)


Evaluations = Literal["evaluations", "others", "servers"]
"""Kinds of evaluations: decoded here under the run's own settings, or under others; measured at a running server."""


def add_evaluation(run_dir: Path, step: int, report: Mapping[str, Any], kind: Evaluations = "evaluations") -> None:
    """Note what answering held-out prompts gave at a step.

    Args:
        run_dir: of the run.
        step: optimizer steps of the drafter.
        report: plain values; ``conditions`` holds all that makes the figures (prompts, limits, temperature, tree, ...).
        kind: an entry under the run's own settings is what card and report show first; a new one takes the place of the
            step's old one. Of the other kinds one is kept for each step and conditions.
    """
    kept = {name: read_evaluations(run_dir, name) for name in get_args(Evaluations)}

    def key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
        return (entry["step"],) if kind == "evaluations" else (entry["step"], entry.get("conditions"))

    entry = {"step": step, **report}
    others = [known for known in kept[kind] if key(known) != key(entry)]
    kept[kind] = sorted([*others, entry], key=lambda known: known["step"])
    write_text(run_dir / EVALUATION, json.dumps(kept, indent=1) + "\n")


def read_evaluations(run_dir: Path, kind: Evaluations = "evaluations") -> list[dict[str, Any]]:
    """Evaluations of one kind by ascending step; step 0 is the untrained drafter.

    Raises:
        RunDirectoryError: the file is damaged.
    """
    path = run_dir / EVALUATION
    if not path.is_file():
        return []
    try:
        found = parsed_json(path.read_text(encoding="utf-8"))
        entries = found.get(kind, [])
        _ = [int(entry["step"]) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error) if isinstance(error, ValueError) else "no evaluations by step"
        raise RunDirectoryError(f"{path}: damaged ({reason}); remove it and evaluate again") from None
    return entries


def versions() -> dict[str, str]:
    """Versions that a run depends on."""
    names = ("torch", "transformers", "datasets", "numpy", "safetensors")
    return {
        "paceline": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def _changed_settings(run_dir: Path, settings: Settings) -> Iterator[str]:
    """A line for each setting that may not change; the last also says which others changed, and which may."""
    changed = _differing(run_dir, settings)
    fixed = {name: pair for name, pair in changed.items() if kind_of(name) == "fixed"}
    others = [name for name in changed if name not in fixed]
    asked = f"of the changes asked for, {', '.join(others)} may stay; " if others else ""
    allowed = f"; {asked}one run may change {', '.join((*STEERED, *FREE))}"
    for name, (before, after) in fixed.items():
        line = (
            f"{run_dir}: made with {name} = {before!r}, asked for {after!r}; put it back, or make another run of it "
            f"with `paceline fork {run_dir} --out NEW --{name} ...`"
        )
        yield line + (allowed if name == list(fixed)[-1] else "")


def fixed_changes(run_dir: Path, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Settings that one run may not change and that differ from the run's: dotted name → (value there, asked for)."""
    return {name: pair for name, pair in _differing(run_dir, settings).items() if kind_of(name) == "fixed"}


def _differing(run_dir: Path, settings: Settings) -> dict[str, tuple[Any, Any]]:
    before, after = named_values(load_settings(run_dir / SETTINGS)), named_values(absolute_paths(settings))
    pairs = {name: (before.get(name), after.get(name)) for name in dict.fromkeys((*before, *after))}
    return {name: (old, new) for name, (old, new) in pairs.items() if name != "run_dir" and old != new}


def _changed_facts(run_dir: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    before = read_run_facts(run_dir)
    for name in facts:
        if name == "target" and name in before and (parts := differing_parts(before[name], facts[name])):
            yield (
                f"{run_dir}: made with another target, which differs in {', '.join(parts)}; "
                "put back the target that it was started with, or give another run_dir"
            )
        elif name in ("versions", "target", "target_fingerprint", *STEERED_FACTS) or name not in before:
            continue  # a fork that has not begun has few facts
        elif before.get(name) != facts[name]:
            yield f"{run_dir}: its {name.replace('_', ' ')} is not today's; what it was made from has changed"
