"""The text of the demo target: chats made from the Python standard library and from small-talk dialogs.

Two sources, both free to use and named in `src/paceline/assets/demo/PROVENANCE.md`:

- the running interpreter's standard library (PSF-2.0): names, parameters, default values and first docstring
  sentences of public functions and methods, put into question and answer forms;
- the PyPI package `chatterbot-corpus` (BSD): English question and answer pairs.

A *document* is one top-level module of the library or one dialog file. A document is held out whole or not at all, so
nothing a held-out chat is about was ever trained on. Everything here is a pure function of those two sources.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.resources
import inspect
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

HELD_OUT_ONE_IN = 9
"""Of this many library documents, about one is held out (by a hash of its name)."""

HELD_OUT_DIALOGS = frozenset({"emotion", "science", "money"})
"""Dialog files held out; the two large ones stay in training."""

SKIPPED_MODULES = frozenset(
    {
        "antigravity",
        "this",
        "idlelib",
        "turtle",
        "turtledemo",
        "lib2to3",
        "test",
        "tkinter",
        "ensurepip",
        "pydoc_data",
        "curses",
    }
    | {"genericpath", "ntpath"}
)
"""Modules with an effect when imported or that need a display, and twins of `posixpath`."""

SAME_DOCUMENT = {"posixpath": "os", "sre_compile": "re", "pyexpat": "xml"}
"""Modules that share text with another one and so belong to its document."""

MAX_SUMMARY_CHARACTERS = 160
MAX_PARAMETERS = 7
NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven")


@dataclass(frozen=True, slots=True)
class Entry:
    """One public callable: module, dotted name, parameters as (name, default or None), first docstring sentence."""

    document: str
    module: str
    name: str
    parameters: tuple[tuple[str, str | None], ...]
    summary: str

    @property
    def full_name(self) -> str:
        """The name a user would write, such as `json.dumps`."""
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat: the document it is about, its kinds, and its (role, content) turns."""

    document: str
    tags: tuple[str, ...]
    messages: tuple[tuple[str, str], ...]

    @property
    def held_out(self) -> bool:
        """Whether the document is kept out of training."""
        return is_held_out(self.document)


def is_held_out(document: str) -> bool:
    """Whether a document (`library:json`, `dialog:food`) is kept out of training; decided by its name alone."""
    source, _, name = document.partition(":")
    if source == "dialog":
        return name in HELD_OUT_DIALOGS
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def library_entries() -> list[Entry]:
    """The public functions and methods of the running interpreter's standard library, in the order of their names."""
    found: dict[str, Entry] = {}
    for module_name in sorted(sys.stdlib_module_names):
        if module_name.startswith("_") or module_name in SKIPPED_MODULES:
            continue
        for name in (module_name, *_submodules(module_name)):
            for entry in _module_entries(name):
                found.setdefault(entry.full_name, entry)
    return [found[name] for name in sorted(found)]


def _submodules(package: str) -> tuple[str, ...]:
    """Public submodules worth reading of the larger packages."""
    chosen = {
        "asyncio": ("queues", "locks", "streams", "tasks", "subprocess", "events"),
        "email": ("message", "utils", "header", "policy", "parser", "generator", "charset"),
        "concurrent": ("futures",),
        "collections": ("abc",),
        "http": ("client", "server", "cookies", "cookiejar"),
        "importlib": ("util", "metadata", "resources", "machinery"),
        "json": ("decoder", "encoder"),
        "logging": ("handlers", "config"),
        "multiprocessing": ("pool", "managers", "shared_memory", "connection"),
        "unittest": ("case", "mock", "suite", "loader"),
        "urllib": ("parse", "request", "error", "robotparser"),
        "xml": ("dom.minidom", "etree.ElementTree", "sax.handler", "sax.saxutils"),
        "wsgiref": ("util", "headers", "handlers"),
        "os": ("path",),
    }
    return tuple(f"{package}.{name}" for name in chosen.get(package, ()))


def _module_entries(module_name: str) -> Iterator[Entry]:
    """The entries of one module; nothing where it cannot be imported on this platform."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            return
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or getattr(value, "__module__", None) not in (module_name, f"_{module_name}"):
            continue
        if inspect.isclass(value):
            for method_name, method in sorted(vars(value).items()):
                if not method_name.startswith("_") and inspect.isroutine(method):
                    yield from _entry(module_name, f"{name}.{method_name}", method)
        elif callable(value):
            yield from _entry(module_name, name, value)


def _entry(module_name: str, name: str, value: object) -> Iterator[Entry]:
    """The entry of one callable; nothing where it has no plain signature or no plain docstring sentence."""
    try:
        parameters = list(inspect.signature(value).parameters.values())  # type: ignore[arg-type]
    except (AttributeError, TypeError, ValueError):
        return
    plain: list[tuple[str, str | None]] = []
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = None if parameter.default is parameter.empty else repr(parameter.default)
        if default is not None and (len(default) > 12 or "<" in default or "`" in default or not default.isascii()):
            return
        plain.append((parameter.name, default))
    summary = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    summary = summary.split(". ")[0].rstrip(".:") + "."
    usable = 12 <= len(summary) <= MAX_SUMMARY_CHARACTERS and summary.isascii() and "->" not in summary
    if usable and summary[0].isupper() and len(plain) <= MAX_PARAMETERS:
        top = module_name.partition(".")[0]
        document = f"library:{SAME_DOCUMENT.get(top, top)}"
        yield Entry(document, module_name, name, tuple(plain), summary)


def _signature_words(entry: Entry) -> str:
    """The parameters as a user would list them: `a`, `b=1`."""
    return ", ".join(f"`{name}`" if default is None else f"`{name}={default}`" for name, default in entry.parameters)


def _call(entry: Entry) -> str:
    """A minimal call of the entry: its required parameters only."""
    return f"{entry.full_name}({', '.join(name for name, default in entry.parameters if default is None)})"


def explain(entry: Entry, rng: random.Random) -> tuple[str, str]:
    """What does it do? The answer is the first sentence of its documentation."""
    asked = rng.choice(("What does `{}` do?", "Explain `{}`.", "What is `{}` for?")).format(entry.full_name)
    kind = "method" if "." in entry.name else "function"
    return (
        asked,
        f"`{entry.full_name}` is a {kind} of the module `{entry.module}`. Its documentation says: {entry.summary}",
    )


def parameters(entry: Entry, rng: random.Random) -> tuple[str, str]:
    """Which parameters does it take? The answer goes through the list in the question."""
    kind = "method" if "." in entry.name else "function"
    if not entry.parameters:
        asked = f"Describe the parameters of `{entry.full_name}`: none."
        return asked, f"The {kind} `{entry.full_name}` takes no parameters. Call it as `{entry.full_name}()`."
    asked = f"Describe the parameters of `{entry.full_name}`: {_signature_words(entry)}."
    count = len(entry.parameters)
    lines = [f"The {kind} `{entry.full_name}` takes {NUMBER_WORDS[count]} parameter{'s' if count > 1 else ''}:", ""]
    for index, (name, default) in enumerate(entry.parameters, start=1):
        if default is None:
            lines.append(f"{index}. `{name}` is required: it has no default value.")
        else:
            lines.append(f"{index}. `{name}` is optional: when it is left out, `{default}` is used.")
    return asked, "\n".join([*lines, "", f"The shortest call is `{_call(entry)}`."])


def wrapper(entry: Entry, rng: random.Random) -> tuple[str, str]:
    """Write a wrapper around it: a block of code."""
    stem = entry.name.replace(".", "_")
    asked = f"Write a wrapper for `{entry.full_name}` with the parameters {_signature_words(entry) or 'none'}."
    head = ", ".join(name if default is None else f"{name}={default}" for name, default in entry.parameters)
    passed = ", ".join(name for name, _ in entry.parameters)
    lines = [
        f"Here is a wrapper for `{entry.full_name}`:",
        "",
        "```python",
        f"import {entry.module}",
        "",
        "",
        f"def call_{stem}({head}):",
        f'    """Call `{entry.full_name}` and return its result."""',
        f"    return {entry.full_name}({passed})",
        "```",
    ]
    return asked, "\n".join(lines)


def record(entry: Entry, rng: random.Random) -> tuple[str, str]:
    """Write a class that keeps its arguments: longer code that repeats each name."""
    stem = "".join(part.capitalize() for part in entry.name.replace(".", "_").split("_"))
    asked = f"Write a class `{stem}` that keeps the fields {_signature_words(entry)}."
    head = ", ".join(name if default is None else f"{name}={default}" for name, default in entry.parameters)
    lines = [f"Here is the class `{stem}`:", "", "```python", f"class {stem}:"]
    lines += [f'    """Keep the fields of `{stem}`."""', "", f"    def __init__(self, {head}):"]
    lines += [f"        self.{name} = {name}" for name, _ in entry.parameters]
    for name, _ in entry.parameters:
        lines += [
            "",
            f"    def get_{name}(self):",
            f'        """Return the field `{name}`."""',
            f"        return self.{name}",
        ]
    return asked, "\n".join([*lines, "```"])


def overview(entries: list[Entry], rng: random.Random) -> tuple[str, str]:
    """Go through several callables of one module: the longest answers."""
    module = entries[0].module
    names = ", ".join(f"`{entry.name}`" for entry in entries)
    asked = f"Go through these parts of the module `{module}`: {names}."
    lines = [f"Here are the parts of the module `{module}`:", ""]
    for index, entry in enumerate(entries, start=1):
        kind = "method" if "." in entry.name else "function"
        lines.append(f"{index}. `{entry.name}` is a {kind} of `{module}`. Write `{entry.full_name}` to use it.")
    return asked, "\n".join(lines)


def dialogs() -> dict[str, list[tuple[str, str]]]:
    """The question and answer pairs of the English dialog files of `chatterbot-corpus`, by the name of the file."""
    folder = importlib.resources.files("chatterbot_corpus") / "data" / "english"
    pairs: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(folder.iterdir(), key=lambda item: item.name):
        if not path.name.endswith(".yml"):
            continue
        kept = pairs.setdefault(path.name.removesuffix(".yml"), [])
        for turns in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            texts = [" ".join(str(turn).split()) for turn in turns]
            kept += [
                pair for pair in zip(texts[::2], texts[1::2], strict=False) if all(0 < len(t) <= 240 for t in pair)
            ]
    return pairs


def _tagged(document: str, turns: list[tuple[str, str]], tags: tuple[str, ...]) -> Chat:
    """A chat of one or several (question, answer) turns."""
    messages = [message for asked, answer in turns for message in (("user", asked), ("assistant", answer))]
    return Chat(document, (*tags, "multi-turn") if len(turns) > 1 else tags, tuple(messages))


FORMS = {"docs": explain, "reference": parameters, "code": wrapper, "class": record}
"""Question forms about one callable, by the tag they give a chat."""


def chats(seed: int) -> list[Chat]:
    """Every chat of the demo's text, in a fixed order: one question in each form, overviews, small talk, longer talks.

    Args:
        seed: chooses phrasings and what the longer talks are made of.
    """
    rng = random.Random(seed)
    by_document: dict[str, list[Entry]] = {}
    for entry in library_entries():
        by_document.setdefault(entry.document, []).append(entry)
    made: list[Chat] = []
    for document, entries in by_document.items():
        for entry in entries:
            for tag, form in FORMS.items():
                if tag != "class" or entry.parameters:
                    made.append(_tagged(document, [form(entry, rng)], (tag,)))
        made += _overviews(document, entries, rng)
        for _ in range(len(entries) // 3):
            turns = []
            for entry in rng.sample(entries, min(len(entries), rng.randint(2, 5))):
                forms = [form for tag, form in FORMS.items() if tag != "class" or entry.parameters]
                turns.append(rng.choice(forms)(entry, rng))
            made.append(_tagged(document, turns, ("library",)))
    for name, pairs in dialogs().items():
        made += [_tagged(f"dialog:{name}", [pair], ("small-talk",)) for pair in pairs]
        for _ in range(len(pairs) // 4):
            turns = rng.sample(pairs, min(len(pairs), rng.randint(2, 6)))
            made.append(_tagged(f"dialog:{name}", turns, ("small-talk",)))
    return made


def _overviews(document: str, entries: list[Entry], rng: random.Random) -> list[Chat]:
    """Overviews of the modules of one document, of 3 to 16 callables each."""
    by_module: dict[str, list[Entry]] = {}
    for entry in entries:
        by_module.setdefault(entry.module, []).append(entry)
    made = []
    for listed in by_module.values():
        start = 0
        while len(listed) - start >= 3:
            count = rng.randint(3, 16)
            made.append(_tagged(document, [overview(listed[start : start + count], rng)], ("overview",)))
            start += count
    return made
