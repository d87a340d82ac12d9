"""The report in a real Chromium: no console message, every drawing with its marks, no overlapping or cut text."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from observed_runs import make_run_directory, plain_reports, simulate
from paceline.config import ObserveConfig
from paceline.observe.observer import open_observer
from paceline.report.comparison import write_comparison
from paceline.report.report import write_report
from paceline.types import Ratio
from report.chromium import BROWSER, look, picture

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium installed"),
]


def failed_run(run_dir: Path) -> Path:
    """A run that was resumed once, skipped steps and ended with an error."""
    for first, last in ((0, 40), (40, 70)):
        observer = open_observer(ObserveConfig(console="quiet"), run_dir, total_steps=500, header={}, first_step=first)
        for report in list(plain_reports(last))[first:]:
            broken = report.step > 60
            report = replace(report, skipped=broken, gradient_norm=math.inf) if broken else report
            observer.step(replace(report, loss=Ratio(math.nan, 1.0)) if broken else report)
        observer.event("failure", error="target 0: batch 17: out of memory")
        observer.close("failed: target 0: batch 17: out of memory")
    return run_dir


def healthy_run(run_dir: Path) -> Path:
    """A level run with everything that a report can show."""
    make_run_directory(run_dir, steps=400, validated=True)
    slots = [{"slot": slot, "conditional": 0.9 - slot / 20} for slot in range(1, 4)]
    tags = {
        name: {"tau": 2.0 + len(name) / 10, "passes": 40, "tokens": 90} for name in ("code", "prose", "a-long-name")
    }
    row = {"id": "p-1", "tau": 2.5, "accepted": [3, 0, 1] * 12, "pieces": [f" word{n}" for n in range(90)]}
    entry = {
        "num_prompts": 24, "passes": 120, "new_tokens": 270, "tau_macro": 2.3, "training_tau": 2.29, "loop_tau": 2.3,
        "training_agrees": True, "control_tau": 1.1, "seconds_per_token": 0.008, "plain_seconds_per_token": 0.02,
        "lossless": {"equal": 24, "prompts": 24}, "slots": slots, "by_tag": tags, "by_context": {"0-255": tags["code"]},
        "rows": [row] * 12, "conditions": {"max_new_tokens": 256, "temperature": 0.0, "dtype": "float32"},
    }  # fmt: skip
    evaluations = [{"step": step, "tau_micro": 1.0 + step / 300} | entry for step in range(0, 401, 50)]
    (run_dir / "evaluation.json").write_text(json.dumps({"evaluations": evaluations}))
    return run_dir


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    healthy = healthy_run(folder / "healthy")
    one_sided = simulate(folder / "one-sided", "bucketed", "shuffled", accumulate=1, epochs=2, plan={})
    level = simulate(folder / "level", "grid", "stratified", epochs=3, plan={})
    failed = failed_run(folder / "failed")
    written = {run.name: write_report(run, folder / f"{run.name}.html") for run in (healthy, one_sided, failed)}
    return written | {"comparison": write_comparison([one_sided, level, failed], folder / "comparison.html")}


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (1400, True), (500, False), (500, True)])
@pytest.mark.parametrize("name", ["healthy", "one-sided", "failed", "comparison"])
def test_a_page_looks_right(pages: dict[str, Path], tmp_path: Path, name: str, width: int, dark: bool) -> None:
    seen = look(pages[name], tmp_path, width, dark=dark)
    page = seen.page
    assert seen.messages == []
    assert page["dark"] == dark and page["broken"] == [] and page["links"] >= 5
    assert page["wider"] <= 0, "the page is wider than the window"
    assert len(page["drawings"]) >= 5
    for drawing in page["drawings"]:
        assert drawing["loaded"] and drawing["marks"] > 10, drawing
        assert drawing["cut"] == [] and drawing["overlapping"] == [], drawing
        assert drawing["smallest"] >= 8, drawing
    # Two or three drawings in a row fill the page; on a phone each does.
    share = 0.25 if width > 1000 else 0.8
    assert all(drawing["width"] >= share * page["width"] for drawing in page["drawings"]), page["drawings"]
    if folder := os.environ.get("PACELINE_PICTURES"):
        out = Path(folder) / f"{name}-{width}{'-dark' if dark else ''}.png"
        picture(pages[name], out, width, 3600 if width > 1000 else 8000, dark=dark)
