"""Small tokenizers for the tests of this package."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from template_families import CHATML, Family, build


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], str]:
    """Family → folder of its tokenizer, built once a session."""
    made: dict[str, str] = {}

    def folder(family: Family) -> str:
        if family.name not in made:
            path = tmp_path_factory.mktemp(family.name.replace(" ", "-"))
            build(family, path)
            made[family.name] = str(path)
        return made[family.name]

    return folder


@pytest.fixture(scope="session")
def chatml(family_folder: Callable[[Family], str]) -> str:
    """Folder of the ChatML tokenizer."""
    return family_folder(CHATML)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Rows (or raw lines) → path of a JSONL file."""

    def write(rows: Sequence[object], name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write
