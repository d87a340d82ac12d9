"""The manifest of a prepared store, as the report reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_manifest(run_dir: Path, **changes: Any) -> None:
    """A small store's manifest in the run directory."""
    report = {
        "rows_in": 50, "rows_used": 48, "samples": 48, "tokens": 9_600, "supervised_tokens": 4_000,
        "eligible_anchors": 3_900, "set_aside": {}, "notes": {}, "warnings": [],
        "tags": {"code": {"samples": 20, "tokens": 5_000, "supervised_tokens": 2_500}},
        "length_histogram": [[128, 20, 2_000], [512, 28, 7_600]],
    }  # fmt: skip
    folder = run_dir / "store"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"report": {**report, **changes}}))
