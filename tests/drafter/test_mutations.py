"""The list of errors stays true to the source; `python tests/drafter/mutations.py` puts them in one by one."""

from __future__ import annotations

import pytest
from mutations import FAULTS


@pytest.mark.parametrize("error", FAULTS, ids=[error.name for error in FAULTS])
def test_errors_can_be_put_in(error):
    for name, text, replacement in error.edits:
        source = error.source(name).read_text(encoding="utf-8")
        assert source.count(text) == 1 and text != replacement
    assert all(file.exists() for file in error.files())
