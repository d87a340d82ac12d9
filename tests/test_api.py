"""The public API: light to import, whole, and as docs/api.md shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

PAGE = Path(__file__).parents[1] / "docs" / "api.md"


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(code)
    return subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=dict(os.environ), capture_output=True, text=True, check=False
    )


def test_importing_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, paceline\n"
        "assert not {'torch', 'numpy', 'pydantic', 'transformers'} & set(sys.modules)\n"
        "paceline.Settings, paceline.load_settings, paceline.plan_epoch, paceline.PlanBatchSampler\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_functions_stay_when_submodules_are_imported() -> None:
    import paceline.evaluate.report
    import paceline.export.verify
    import paceline.train

    assert all(callable(getattr(paceline, name)) for name in paceline.__all__)
    with pytest.raises(AttributeError, match="no attribute nothing"):
        paceline.nothing  # noqa: B018


def test_every_public_name_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"| `{name}" in text for name in paceline.__all__)


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+ samples, \d+ tokens$", done.stdout, flags=re.M)
    assert "step 4 of 4" in done.stdout and "acceptance length" in done.stdout
    assert (tmp_path / "runs/api/export/zlab/model.safetensors").is_file()
