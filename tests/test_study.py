"""The study of plans in its quick form: equal work, real runs, all figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_quick_study_measures_every_run(project: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(project / "benchmarks" / "study.py"), "--work", str(tmp_path), "--quick"]
    written: list[list[int]] = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        runs = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))
        assert [run["plan"] for run in runs] == ["six buckets", "grid, stratified"]
        for run in runs:
            assert run["steps"] == [2, 4] and len(run["validation_tau"]) == len(run["validation_tree_tau"]) == 2
            assert set(run["decoded_by_kind"]) == {"prose", "code"} and 0 < run["padding_efficiency"] < 1
        assert "grid, stratified" in done.stdout and (tmp_path / "study.png").stat().st_size > 10_000
        written.append([(tmp_path / run["name"] / "metrics.jsonl").stat().st_mtime_ns for run in runs])
    assert written[0] == written[1], "runs that are there were trained again"
