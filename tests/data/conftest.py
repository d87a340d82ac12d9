"""Small tokenizers for the tests of this package."""

from __future__ import annotations

from collections.abc import Callable

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
