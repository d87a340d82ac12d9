"""The demo, cut short: every stage runs and leaves what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main


def test_the_demo_runs_once_and_is_then_only_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "demo"
    words = ["demo", "--run-dir", str(run_dir), "--train.max_steps", "6", "--evaluate.num_prompts", "2"]
    assert main(words) == 0
    out = capfd.readouterr().out
    for words_of_summary in ("acceptance length τ", "2 of 2 equal", "padding efficiency", "real tokens/s", "report"):
        assert words_of_summary in out
    evaluations = json.loads((run_dir / "evaluation.json").read_text())["evaluations"]
    assert [entry["step"] for entry in evaluations] == [0, 6]
    assert (run_dir / "export" / "zlab" / "model.safetensors").is_file()
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert (run_dir / "store" / "manifest.json").is_file()
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    assert main(words) == 0
    assert "2 of 2 equal" in capfd.readouterr().out
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics
