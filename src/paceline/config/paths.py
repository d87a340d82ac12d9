"""Paths among the settings: those in a settings file are relative to the file, those of flags to the working directory.

`target.path` and the data may also be names on a hub or addresses, which stay as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.config.schema import Settings

PATHS = (
    "run_dir",
    "target.path",
    "target.adapter",
    "data.train",
    "data.heldout",
    "data.store",
    "drafter.init",
    "target.vllm_environment",
)
"""Settings that hold a path, or a list of paths."""
_MADE = ("run_dir", "data.store")
"""Those that a run makes; the others must be there."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def place_paths(document: dict[str, Any], file: Path, origins: Mapping[tuple[str, ...], str]) -> list[str]:
    """Join the paths of a settings file, as read from YAML, with the folder of the file.

    Args:
        document: changed in place.
        file: the settings file.
        origins: `file:line` of each value.

    Returns:
        A line for each path that is not there beside the file, but is in the working directory.
    """
    errors = []
    for name, place, key, value in _texts(document):
        before, path, after = _parts(name, value)
        here = Path(path).expanduser()
        placed = file.parent / here
        if not path or (_may_be_hub(name, value) and not placed.exists() and not here.exists()):
            continue
        place[key] = f"{before}{placed}{after}"
        if here.exists() and not placed.exists() and name not in _MADE:
            where = origins.get((*name.split("."), str(key)), origins.get(tuple(name.split(".")), str(file)))
            errors.append(
                f"{where}: {name}: {path}: not found at {placed.absolute()}; paths in a settings file are relative to "
                f"the file: write {os.path.relpath(here, file.parent)}"
            )
    return errors


def absolute_paths(settings: Settings) -> Settings:
    """The same settings with absolute paths, for a copy that is read from another place."""
    document = settings.model_dump()
    for name, place, key, value in _texts(document):
        before, path, after = _parts(name, value)
        if path and (not _may_be_hub(name, value) or Path(path).exists()):
            place[key] = f"{before}{Path(path).absolute()}{after}"
    return Settings.model_validate(document)


def _texts(document: dict[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    """Name, container, key and text of every value of `PATHS`."""
    for name in PATHS:
        *sections, last = name.split(".")
        place = document
        for section in sections:
            inner = place.get(section)
            place = inner if isinstance(inner, dict) else {}
        value = place.get(last)
        if isinstance(value, str):
            yield name, place, last, value
        elif isinstance(value, list):
            place[last] = value = list(value)
            yield from ((name, value, number, text) for number, text in enumerate(value) if isinstance(text, str))


def _parts(name: str, value: str) -> tuple[str, str, str]:
    """What is before the path, the path (empty for an address), and the options after it: ``FILE#tag=code``."""
    if not name.startswith("data."):
        return "", value, ""
    bare, mark, options = value.rpartition("#")
    if not mark or "=" not in options:
        bare, mark, options = value, "", ""
    before = "hub:" if bare.startswith("hub:") else ""
    return before, "" if "://" in bare else bare.removeprefix(before), mark + options


def _may_be_hub(name: str, value: str) -> bool:
    return value.startswith("hub:") or (name == "target.path" and _HUB_NAME.fullmatch(value) is not None)
