"""What every command shares: parsing (tyro), settings from YAML and dotted flags, errors as one line each.

Commands parse first and import torch after.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape

from paceline.config import Settings, hint_for, known_names, load_settings, setting_rows
from paceline.errors import ConfigError, PacelineError

Arguments = TypeVar("Arguments")

stdout = Console(highlight=False, soft_wrap=True)
"""What a command was asked for."""
stderr = Console(stderr=True, highlight=False, soft_wrap=True)
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
    if settings and any(word in ("-h", "--help") for word in argv):
        description += "\n\n" + settings_help()
    arguments, rest = tyro.cli(kind, args=list(argv), prog=prog, description=description, return_unknown_args=True)
    return arguments, _dotted(rest, allowed=settings, prog=prog)


def settings_help() -> str:
    """All settings with type, default and sentence, one a line."""
    rows = [f"  --{name} ({kind}, default {default}): {text}" for name, kind, default, text in setting_rows()]
    return "Settings, as YAML keys or as flags of the same dotted name:\n" + "\n".join(rows)


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


def read_settings(path: str, overrides: dict[str, str]) -> Settings:
    """Settings of a command: YAML file overridden by dotted flags; errors as `ConfigError`."""
    return load_settings(path, overrides)


def notice(text: str) -> None:
    """Something that the user should know at once."""
    stderr.print(f"[bold yellow]{escape(text)}[/]")


def write_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=False) + "\n")


def guarded(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a command; turn errors and Ctrl-C into one line each and an exit code (0 done, 1 failed, 2 misused)."""
    try:
        return command(argv)
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
        where, what = error.filename or "input or output", error.strerror or error
        show_error(f"{where}: {what}; fix that, then run the command again")
        return 1


def show_error(line: str) -> None:
    """One error as one line; control characters, which data may bring in, are shown instead of sent."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    stderr.print(f"[bold red]error:[/] {escape(shown)}")
