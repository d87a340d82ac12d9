"""The list of faults stays true to the source; `python tests/drafter/mutations.py` puts them in one by one."""

from __future__ import annotations

import pytest
from mutations import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_faults_can_be_put_in(fault):
    for name, text, replacement in fault.edits:
        source = fault.source(name).read_text(encoding="utf-8")
        assert source.count(text) == 1 and text != replacement
    assert all(file.exists() for file in fault.files())
