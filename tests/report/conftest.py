from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from observed_runs import make_run_directory


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run directory and gives its path; see `make_run_directory`."""

    def make(steps: int = 40, name: str = "run", **kind) -> Path:
        return make_run_directory(tmp_path / name, steps=steps, **kind)

    return make
