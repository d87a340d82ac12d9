"""What stands beside a run's metrics: settings, facts, evaluations, checked before the report believes it.

A file that is missing or holds something else costs its own content and a sentence, never the report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from paceline.config import Settings
from paceline.config.section import Section

MAX_EVALUATIONS = 500
"""Evaluations read, the newest ones and the first."""
MOST = 2**53
"""Integers beyond this are no counts of anything that a run holds."""


def read_settings(run_dir: Path, notes: list[str]) -> dict[str, Any]:
    """Resolved settings as a nested mapping; sections that are no mappings are left out, with a note."""
    settings = read_mapping(run_dir / "settings.yaml", yaml.safe_load, notes, empty="what was asked for is unknown")
    for name, field in Settings.model_fields.items():
        kind = field.annotation
        if not (isinstance(kind, type) and issubclass(kind, Section)) or name not in settings:
            continue
        value = settings[name]
        if not isinstance(value, dict):
            what = "empty" if value is None else shortened(repr(value), 60)
            notes.append(f"settings.yaml: {name} is {what}, a mapping belongs there; it is left out")
            del settings[name]
    return settings


def read_facts(run_dir: Path, notes: list[str]) -> dict[str, Any]:
    """run.json."""
    return read_mapping(run_dir / "run.json", json.loads, notes, empty="versions and fingerprints are unknown")


def read_evaluations(run_dir: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Evaluations by ascending step, at most `MAX_EVALUATIONS`; numbers that are none are None."""
    path = run_dir / "evaluation.json"
    if not path.is_file():
        notes.append("evaluation.json is missing: no held-out prompt was decoded yet")
        return []
    found = read_mapping(path, json.loads, notes, empty="no held-out prompt was decoded")
    entries = found.get("evaluations", [found] if found else [])
    listed = entries if isinstance(entries, list) else []
    good = [_plain(entry) for entry in listed if isinstance(entry, dict) and _is_step(entry.get("step"))]
    if len(good) < len(listed) or not isinstance(entries, list):
        notes.append("evaluation.json: entries without a step are left out")
    good.sort(key=lambda entry: entry["step"])
    if len(good) > MAX_EVALUATIONS:
        notes.append(f"evaluation.json: {len(good) - MAX_EVALUATIONS} of {len(good)} evaluations are left out")
        good = [good[0], *good[1 - MAX_EVALUATIONS :]]
    return good


def read_mapping(path: Path, parse: Callable[[str], Any], notes: list[str], *, empty: str) -> dict[str, Any]:
    """A nested mapping from a file; a note and an empty mapping where there is none.

    Args:
        path: the file.
        parse: from its text.
        notes: added to.
        empty: what an empty file means.
    """
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({shortened(str(error).splitlines()[0], 200)})")
        return {}
    if value is None or value == {}:
        notes.append(f"{path.name} is empty: {empty}")
        return {}
    if _holds_itself(value):
        notes.append(f"{path.name} has a part that holds itself and is left out")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} holds a {type(value).__name__} where a mapping belongs")
        return {}
    return value


def _holds_itself(value: Any) -> bool:
    """Whether a list or mapping is inside itself, as YAML's anchors allow."""
    done: set[int] = set()
    stack: list[tuple[Any, frozenset[int]]] = [(value, frozenset())]
    while stack:
        inner, around = stack.pop()
        if not isinstance(inner, (dict, list)) or id(inner) in done:
            continue
        around |= {id(inner)}
        children = list(inner.values()) if isinstance(inner, dict) else inner
        if any(id(child) in around for child in children):
            return True
        done.add(id(inner))
        stack += [(child, around) for child in children]
    return False


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and an ellipsis where it is longer than ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def whole_numbers(value: Any) -> list[int]:
    """The members of a list that are integers a run can hold; nothing where there is no list."""
    return [number for number in value if _is_step(number)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number; None for anything else, booleans too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > MOST:
        return None
    return float(value) if math.isfinite(value) else None


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _plain(value: Any) -> Any:
    """JSON's content with numbers that are none, or beyond all measure, as None."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value if number(value) is not None else None
    return value
