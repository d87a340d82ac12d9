"""The shape of the source: no import cycles, one name for one class, no module that says nothing, no old words."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

FORBIDDEN = {"utils", "util", "common", "helpers", "helper", "misc", "base", "manager", "shared", "tools"}
MAX_MODULE_LINES = 600
LOOSE = {
    *("__init__", "__main__", "train", "types", "errors", "version"),
    *("atomic_files", "device", "stop_tokens", "terminal", "text"),
}
"""Modules that stand beside the packages: what is read first, and small things that every package uses."""
OLD_WORDS = (
    *("BufferPool", "StepOrder", "CloseWindow", "KeepTask", "StopRequest", "LearnerRecipe"),
    *(r"paceline\.flow", r"paceline\.target\b", r"paceline\.feed", r"paceline\.contracts", r"paceline\.compose"),
    *(r"\bfaults?\b", r"\bmend(s|ed|ing)?\b", r"\breckon", r"put aside", r"\bby heart\b"),
)
"""Names and words of before; one word for one thing."""


@pytest.fixture(scope="module")
def modules(project: Path) -> dict[str, Path]:
    """All modules of the package by dotted name."""
    root = project / "src"
    paths = sorted((root / "paceline").rglob("*.py"))
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules that a module imports: at its top, inside functions, and for type checking only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in modules else node.module for name in inner)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & set(modules)


def reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    """All modules that can be reached from one by one import or more."""
    seen: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(edges[name])
    return seen


def test_no_import_cycles(modules: dict[str, Path]) -> None:
    edges = {name: imports_of(path, modules) for name, path in modules.items()}
    assert sum(map(len, edges.values())) > 500, "the imports were not found"
    assert not [name for name in edges if name in reachable(name, edges)]


def test_a_cycle_would_be_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert [name for name in edges if name in reachable(name, edges)] == ["a", "b", "c"]


def test_no_two_classes_share_a_name(modules: dict[str, Path]) -> None:
    names: Counter[str] = Counter()
    for name, path in modules.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not (name.startswith("paceline.cli.") and node.name == "Arguments"):
                names[node.name] += 1
    assert [name for name, count in names.items() if count > 1] == []


def test_modules_have_names_and_sizes(modules: dict[str, Path], project: Path) -> None:
    top = {path.stem for path in (project / "src" / "paceline").glob("*.py")}
    assert top <= LOOSE
    assert not [name for name in modules if name.rsplit(".", 1)[-1] in FORBIDDEN]
    sizes = {name: path.read_text(encoding="utf-8").count("\n") for name, path in modules.items()}
    assert not {name: size for name, size in sizes.items() if size > MAX_MODULE_LINES}


def test_every_package_says_what_it_is_for(modules: dict[str, Path]) -> None:
    for name, path in modules.items():
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if path.name == "__init__.py" and name.count(".") == 1 and not name.startswith("paceline.assets"):
            assert text is not None and len(text) > 100, f"{name}: say what comes in, what goes out, what is elsewhere"


@pytest.mark.parametrize("word", OLD_WORDS)
def test_old_words_are_gone(word: str, project: Path) -> None:
    pages = [path for path in (project / "docs").rglob("*.md") if path.name != "CHANGELOG.md"]
    files = [*(project / "src" / "paceline").rglob("*.py"), *pages, project / "README.md"]
    found = [path.name for path in files if re.search(word, path.read_text(encoding="utf-8"))]
    assert not found


def test_tests_have_short_names(project: Path) -> None:
    names = [
        node.name
        for path in (project / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 500 and not [name for name in names if len(name) > 60]
