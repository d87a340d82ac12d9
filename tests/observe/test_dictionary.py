from __future__ import annotations

from pathlib import Path

from paceline.observe.catalogue import CATALOGUE
from paceline.observe.dictionary import dictionary


def test_the_document_is_in_step_with_the_catalogue():
    document = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert document.read_text(encoding="utf-8") == dictionary(), "renew it: python -m paceline.observe.dictionary"
    for metric in CATALOGUE:
        assert f"| `{metric.name}` |" in dictionary()
