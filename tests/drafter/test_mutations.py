"""The list of faults stays true to the source; `python tests/drafter/mutations.py` puts them in one by one."""

from __future__ import annotations

import pytest
from mutations import FAULTS, PROJECT, ROOM


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_faults_can_be_put_in(fault):
    for name, text, replacement in fault.edits:
        source = (PROJECT / ROOM / name).read_text(encoding="utf-8")
        assert source.count(text) == 1 and text != replacement
    files = fault.tests.partition(" -k ")[0].split()
    assert all((PROJECT / "tests" / "drafter" / file).exists() for file in files)
