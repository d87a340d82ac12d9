"""Reads settings from YAML and dotted flags; reports every error at once, one line each, with file and line.

No torch: a misspelt key must be answered in well under a second.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from paceline.config.paths import place_paths
from paceline.config.schema import Settings
from paceline.errors import ConfigError
from paceline.text import absent, first_line, masked_values

KeyPath = tuple[str, ...]
"""Keys from the root of the settings down to one value; list positions are written as their number."""

RENAMED = {
    "flow.verifier_device": "evaluate.device",
    "flow.verifier_wait_s": "evaluate.wait_s",
    "observe.mirror_queue_lines": "observe.tracker_queue_lines",
    "observe.mirror_start_limit_s": "observe.tracker_start_limit_s",
    "observe.mirror_close_limit_s": "observe.tracker_close_limit_s",
}
"""Old name of a setting → its name today. Old names are refused with this hint, never read."""
REMOVED = {
    "drafter.hidden_size": "the drafter is always as wide as the target; drop the key",
    "observe.alert_webhook": "use observe.alert_command, for example with curl",
    "observe.alert_after_s": "a stuck stage is named after flow.stall_limit_s; drop the key",
}
"""Name of a setting that is gone → what to do."""


def load_settings(path: str | Path | None, overrides: Mapping[str, str] | None = None) -> Settings:
    """Settings of a YAML file, overridden by dotted flags.

    Args:
        path: YAML file, or None for flags alone. Paths in it are relative to its folder, those of flags to the working
            directory.
        overrides: dotted name → text as typed (``{"optimizer.lr": "3e-4"}``), read as YAML values.

    Returns:
        The validated settings.

    Raises:
        ConfigError: one line per error: ``file:line: key = value: what is wrong; what to do``.
    """
    document, origins, errors = _read_document(path) if path is not None else ({}, {}, [])
    if path is not None:
        errors += place_paths(document, Path(path), origins)
    for name, text in (overrides or {}).items():
        errors += _apply_override(document, origins, name, text)
    if errors:
        raise ConfigError(*errors)
    return validate_settings(document, origins, str(path) if path is not None else "command line")


def validate_settings(document: Any, origins: Mapping[KeyPath, str], source: str) -> Settings:
    """Settings from a nested mapping.

    Args:
        document: nested mapping as YAML gives it.
        origins: place (``file:line`` or ``--flag``) by path, for the errors.
        source: name of the whole document, for values without their own place.

    Raises:
        ConfigError: one line per error.
    """
    try:
        return Settings.model_validate(document)
    except ValidationError as error:
        raise ConfigError(*_error_lines(error, document, origins, source)) from None


def settings_copy(settings: Settings) -> dict[str, Any]:
    """The settings as plain values for copies that others may read (checkpoints, exports): no passwords, no keys."""
    return masked_values(settings.model_dump(mode="json"))


def dump_settings(settings: Settings) -> str:
    """Resolved settings as YAML, every key written out, in the order of the schema."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, width=120)


def named_values(settings: BaseModel | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every setting under its dotted name, as a plain value: what two runs or machines are compared by."""
    values = settings.model_dump(mode="json") if isinstance(settings, BaseModel) else settings
    named: dict[str, Any] = {}
    for key, value in values.items():
        inner = named_values(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        named.update(inner)
    return named


def setting_rows(model: type[BaseModel] = Settings, prefix: KeyPath = ()) -> Iterator[tuple[str, str, str, str]]:
    """Every setting as (dotted name, type, default, sentence), for help texts and documentation."""
    for name, info in model.model_fields.items():
        inner = _section_of(info)
        if inner is not None:
            yield from setting_rows(inner, (*prefix, name))
        else:
            default = "required" if info.is_required() else yaml.safe_dump(_default_of(info), default_flow_style=True)
            text = default.replace("\n...", "").strip()
            yield ".".join((*prefix, name)), _type_text(info.annotation), text, info.description or ""


@cache
def known_names() -> tuple[str, ...]:
    """Dotted names of all settings."""
    return tuple(name for name, *_ in setting_rows())


def hint_for(name: str) -> str:
    """What a user who wrote this unknown dotted name should write instead."""
    if name in RENAMED:
        return f"did you mean {RENAMED[name]}? (its name today)"
    if name in REMOVED:
        return REMOVED[name]
    section, _, key = name.rpartition(".")
    known = known_names()
    same_key = [other for other in known if other.rpartition(".")[2] == key]
    if len(same_key) == 1:
        return f"did you mean {same_key[0]}?"
    owner = _model_at(tuple(section.split(".")) if section else ())
    return suggestion(key, list(owner.model_fields)) if owner is not None else suggestion(name, known)


def suggestion(name: str, allowed: Sequence[str]) -> str:
    """The nearest allowed name as a hint, or the list where it is short, or nothing."""
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    return f"allowed: {', '.join(allowed)}" if len(allowed) <= 14 else "see `paceline train --help` for all names"


def _default_of(info: FieldInfo) -> Any:
    return None if info.default is PydanticUndefined else info.default


def _section_of(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _type_text(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return " | ".join(str(value) for value in get_args(kind))
    if origin in (Union, types.UnionType):
        return " | ".join(_type_text(part) for part in get_args(kind) if part is not type(None))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_type_text(part) for part in get_args(kind))}]"
    return getattr(kind, "__name__", str(kind))


def _read_document(path: str | Path) -> tuple[dict[str, Any], dict[KeyPath, str], list[str]]:
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _check_values(node, file)
        document = yaml.safe_load(text)
    except ConfigError:
        raise
    except FileNotFoundError:
        there = sorted(path.name for path in file.parent.glob("*.y*ml"))
        near = difflib.get_close_matches(file.name, there, n=1)
        todo = f"did you mean {file.with_name(near[0])}?" if near else "give a YAML file or a run directory"
        raise ConfigError(f"{file}: {absent(file, 'settings file')} (looked at {file.absolute()}); {todo}") from None
    except IsADirectoryError:
        raise ConfigError(f"{file}: a folder without a run; give a settings file or the directory of a run") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as text ({error}); give the path of a YAML file") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file}:{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {first_line(error)}") from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply for settings; a section holds keys, a key a value") from None

    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError(f"{file}:1: settings are a mapping of sections, this is a {type(document).__name__}")
    origins: dict[KeyPath, str] = {}
    errors: list[str] = []
    if node is not None:
        _collect_origins(node, (), file, origins, errors)
    return document, origins, errors


MAX_VALUES = 100_000
"""Values of a settings file, with those behind aliases each time that they are named."""


def _check_values(root: yaml.Node, file: Path) -> None:
    """Refuse what looks like a date or a number and is none, and aliases that stand for themselves or, named again and
    again, for more values than memory holds."""
    sizes: dict[int, int | None] = {}
    loader = yaml.SafeLoader("")

    def size_of(node: yaml.Node) -> int:
        """Values that a node stands for, its own and those of its aliases."""
        line = node.start_mark.line + 1
        if id(node) in sizes:
            known = sizes[id(node)]
            if known is None:
                raise ConfigError(f"{file}:{line}: an alias stands for itself; write the value")
            return known
        sizes[id(node)] = None
        inner = node.value if isinstance(node, (yaml.MappingNode, yaml.SequenceNode)) else []
        parts = [part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,))]
        total = 1 + sum(size_of(part) for part in parts)
        if isinstance(node, yaml.ScalarNode):
            try:
                loader.construct_object(node)
            except ValueError as error:
                raise ConfigError(
                    f"{file}:{line}: {node.value}: cannot be read ({error}); write it in quotes"
                ) from None
        if total > MAX_VALUES:
            raise ConfigError(f"{file}:{line}: more than {MAX_VALUES} values, through aliases; write them out")
        sizes[id(node)] = total
        return total

    size_of(root)


def _collect_origins(
    node: yaml.Node, path: KeyPath, file: Path, origins: dict[KeyPath, str], errors: list[str]
) -> None:
    origins.setdefault(path, f"{file}:{node.start_mark.line + 1}")
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                errors.append(f"{file}:{key.start_mark.line + 1}: {'.'.join((*path, name))} is given twice; keep one")
            seen.add(name)
            origins[(*path, name)] = f"{file}:{key.start_mark.line + 1}"
            _collect_origins(value, (*path, name), file, origins, errors)
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(node.value):
            _collect_origins(value, (*path, str(position)), file, origins, errors)


def _apply_override(document: dict[str, Any], origins: dict[KeyPath, str], name: str, text: str) -> list[str]:
    path = tuple(name.replace("-", "_").split("."))
    flag = f"--{name}"
    kinds = {known: kind for known, kind, *_ in setting_rows()}
    if ".".join(path) not in kinds:
        return [f"{flag}: unknown setting; {hint_for('.'.join(path))}"]
    value = _flag_value(text, kinds[".".join(path)])
    place = document
    for key in path[:-1]:
        inner = place.get(key)
        if not isinstance(inner, dict):
            inner = {}
            place[key] = inner
        place = inner
    place[path[-1]] = value
    origins[path] = flag
    return []


def _flag_value(text: str, kind: str) -> Any:
    """The value of a flag: YAML, but the text itself for a setting of type text, whatever it looks like."""
    if kind == "str":
        return None if text == "null" else text
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return _number(value) if isinstance(value, str) else value


def _number(text: str) -> Any:
    """YAML 1.1 reads 3e-4 as text; people mean the number."""
    try:
        return float(text) if any(c.isdigit() for c in text) and "e" in text.lower() else text
    except ValueError:
        return text


def _error_lines(error: ValidationError, document: Any, origins: Mapping[KeyPath, str], source: str) -> list[str]:
    lines = [
        (_place(tuple(str(part) for part in detail["loc"]), origins, source), _explain(detail, document))
        for detail in error.errors(include_url=False)
    ]
    return [f"{place}: {text}" for place, text in lines]


def _place(path: KeyPath, origins: Mapping[KeyPath, str], source: str) -> str:
    while path and path not in origins:
        path = path[:-1]
    return origins.get(path, source)


def _explain(error: ErrorDetails, document: Any) -> str:
    path = tuple(str(part) for part in error["loc"])
    name = ".".join(path)
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"{name}: unknown key; {hint_for(name)}"
    if kind == "missing":
        return f"{name}: required but not given; {_sentence(path)}"
    shown = "" if isinstance(error["input"], (dict, list)) and kind == "value_error" else f" = {_short(error['input'])}"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "literal_error":
        choices = [str(choice).strip("'") for choice in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        hint = suggestion(str(error["input"]), choices)
        every = "" if hint.startswith("allowed: ") else f" (one of {', '.join(choices)})"
        return f"{name}{shown}: not allowed; {hint}{every}"
    message = message.removeprefix("Input should be ")
    text = message if kind == "value_error" else f"must be {message}"
    sentence = _sentence(path)
    return f"{name}{shown}: {text}" + (f" ({sentence})" if sentence and kind != "value_error" else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _model_at(path: KeyPath) -> type[BaseModel] | None:
    model: type[BaseModel] | None = Settings
    for key in path:
        info = model.model_fields.get(key) if model is not None else None
        model = _section_of(info) if info is not None else None
    return model


def _sentence(path: KeyPath) -> str:
    owner = _model_at(path[:-1])
    info = owner.model_fields.get(path[-1]) if owner is not None and path else None
    return (info.description or "").split(". ")[0].rstrip(".") if info is not None else ""
