"""What every command shares: parsing (tyro), settings from YAML and dotted flags, errors as one line each.

Commands parse first and import torch after.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import tyro
from rich.markup import escape

from paceline.checkpoint.run_directory import is_run_directory, read_run_settings
from paceline.config import Settings, hint_for, known_names, load_settings, setting_rows
from paceline.errors import ConfigError, Interrupted, PacelineError
from paceline.terminal import PlainConsole
from paceline.text import first_line, masked

Arguments = TypeVar("Arguments")

stdout = PlainConsole()
"""What a command was asked for."""
stderr = PlainConsole(stderr=True)
"""Errors and progress."""


def parse(
    kind: type[Arguments], argv: Sequence[str], *, prog: str, description: str, settings: bool = False
) -> tuple[Arguments, dict[str, str]]:
    """Arguments of a command, and the dotted setting flags among them.

    Args:
        kind: dataclass of the command's own arguments.
        argv: words after the command's name.
        prog: ``paceline NAME``.
        description: shown by ``--help``, ends with an example.
        settings: whether dotted flags of the settings are allowed.

    Returns:
        The arguments, and dotted name → text.

    Raises:
        ConfigError: unknown flags, one line each.
        SystemExit: ``--help`` (0) or misuse that tyro reports (2).
    """
    if settings:
        _help_on_settings(argv)
        sections = ", ".join(name for name in Settings.model_fields if name in _sections())
        description += (
            f"\nSettings (YAML keys, or flags of the same dotted name, for example --optimizer.lr 3e-4): {sections}.\n"
            f"`{prog} --help SECTION` explains those of a section, `{prog} --help-all` all of them."
        )
    missing = [
        entry.name.upper() for entry in fields(cast(Any, kind)) if entry.default is MISSING is entry.default_factory
    ]
    if missing and not argv:
        example = next(prog + line.partition(prog)[2] for line in description.splitlines() if f"{prog} " in line)
        raise ConfigError(f"{missing[0]}: not given; for example: {example}")
    own = {entry.name for entry in fields(cast(Any, kind))}
    words, of_settings = _apart(argv, own) if settings else (list(argv), [])
    arguments, rest = tyro.cli(kind, args=words, prog=prog, description=description, return_unknown_args=True)
    return arguments, _dotted([*rest, *of_settings], allowed=settings, prog=prog)


def _apart(argv: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """The words of a command's own arguments, and flags of settings with their values.

    What tyro does not know it leaves, but a value after such a flag would fill a place of the command's arguments.
    """
    words, of_settings = [], []
    waits = False
    for word in argv:
        name = word[2:].partition("=")[0].replace("-", "_")
        if word.startswith("--") and name in known_names() and name not in own:
            of_settings.append(word)
            waits = "=" not in word
        else:
            (of_settings if waits and not word.startswith("--") else words).append(word)
            waits = False
    return words, of_settings


def _sections() -> set[str]:
    """Names of the settings' sections, ``run`` for those that are in none."""
    return {name.partition(".")[0] for name in known_names() if "." in name}


def _help_on_settings(words: Sequence[str]) -> None:
    """Answer ``--help-all`` and ``--help SECTION``; then the program ends."""
    asked = [after for word, after in pairwise(words) if word in ("-h", "--help")]
    section = next((name for name in asked if name in _sections()), None)
    if section is None and "--help-all" not in words:
        return
    for name, kind, default, text in setting_rows():
        if section in (None, name.partition(".")[0]):
            stdout.print(f"[bold]--{name}[/]  {escape(f'{kind}, default {default}')}\n    {escape(text)}")
    raise SystemExit(0)


def _dotted(words: Sequence[str], *, allowed: bool, prog: str) -> dict[str, str]:
    found: dict[str, str] = {}
    errors: list[str] = []
    pending: str | None = None
    for word in words:
        if word.startswith("--"):
            if pending is not None:
                errors.append(f"--{pending}: no value given; write --{pending} VALUE")
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            if not allowed or key not in known_names():
                hint = hint_for(key) if allowed else f"see `{prog} --help`"
                errors.append(f"--{name}: unknown flag; {hint}")
                pending = None if equals else ""
            elif equals:
                found[key], pending = value, None
            else:
                pending = key
        elif pending is None:
            errors.append(f"{word}: unexpected argument; see `{prog} --help`")
        else:
            if pending:
                found[pending] = word
            pending = None
    if pending:
        errors.append(f"--{pending}: no value given; write --{pending} VALUE")
    if errors:
        raise ConfigError(*errors)
    return found


def read_settings(path: Path, overrides: dict[str, str]) -> Settings:
    """Settings of a YAML file, or of a run directory, overridden by dotted flags."""
    return read_run_settings(path, overrides) if is_run_directory(path) else load_settings(path, overrides)


def step_of_run(run_dir: Path, step: int | None, *, best: bool) -> int | None:
    """The checkpoint that ``--step`` or ``--best`` asks for; None for the newest.

    Raises:
        ConfigError: both are given.
        CheckpointError: none was measured.
    """
    from paceline.checkpoint.best import best_step

    if best and step is not None:
        raise ConfigError(f"--best: does not go with --step {step}; give one of the two")
    return best_step(run_dir) if best else step


def no_step_of_folder(folder: Path, step: int | None, *, best: bool) -> None:
    """Refuse ``--step`` and ``--best`` for a drafter folder.

    Raises:
        ConfigError: one is given.
    """
    if best or step is not None:
        given = "--best" if best else f"--step {step}"
        raise ConfigError(f"{given}: {folder} is a drafter folder; only runs have steps")


def notice(text: str) -> None:
    """Something that the user should know at once."""
    stderr.print(f"[bold yellow]{escape(masked(text))}[/]")


def write_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=False) + "\n")


def guarded(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a command; turn errors and Ctrl-C into one line each and an exit code (0 done, 1 failed, 2 misused)."""
    try:
        return command(argv)
    except Interrupted as stop:
        notice(str(stop))
        return stop.exit_code
    except PacelineError as error:
        for line in error.errors:
            show_error(line)
        return error.exit_code
    except KeyboardInterrupt:
        stderr.print("[bold yellow]interrupted[/]; what was finished is kept; run the same command to resume")
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        # Disks, permissions, networks: errors of the place, not of the code.
        where, what = error.filename or "input or output", first_line(error)
        show_error(f"{where}: {what}; fix that, then run the command again")
        return 1


def show_error(line: str) -> None:
    """One error as one line, without passwords and keys; line ends, which data may bring in, are shown as ``\\n``."""
    shown = masked(line).replace("\n", "\\n")
    stderr.print(f"[bold red]error:[/] {escape(shown)}")
