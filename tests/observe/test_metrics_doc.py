from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_page_is_in_step_with_the_catalogue(project: Path) -> None:
    program = [sys.executable, str(project / "scripts" / "metrics_doc.py")]
    document = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout
    assert (project / "docs" / "metrics.md").read_text(encoding="utf-8") == document, "python scripts/metrics_doc.py"
