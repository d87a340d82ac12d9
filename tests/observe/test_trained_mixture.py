"""The story, with real training: short prose, long code, and a plan that never lets them meet in one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli import main
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.diagnosis.mixture import Jitter, explain_jitter
from paceline.observe.run_history import History, read_history
from paceline.report.report import write_report

STEPS = 70


@pytest.fixture(scope="module")
def skewed_chats(demo_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many short answers in prose, and few long ones that list code, as chat data is."""
    rows = [json.loads(line) for line in (demo_assets / "chats.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row["messages"]) == 2]
    short = [row["messages"] for row in rows if "class" not in row["tags"] and len(row["messages"][1]["content"]) < 200]
    code = [row["messages"] for row in rows if "class" in row["tags"]]
    listing = code[0][1]["content"]
    long = [[chat[0], {"role": "assistant", "content": "\n\n".join([listing] * 3)}] for chat in code[:24]]
    path = tmp_path_factory.mktemp("skewed") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in [*short[:120], *long]), encoding="utf-8")
    return path


def trained(folder: Path, assets: Path, chats: Path, steps: int = STEPS, **plan: Any) -> History:
    """A real run of a tiny drafter on the embedded target, one process."""
    folder.mkdir(exist_ok=True)
    settings = {
        "run_dir": str(folder / "run"),
        "target": {"path": str(assets / "target"), "dtype": "float32", "num_taps": 2},
        "data": {"train": [str(chats)], "store": str(folder.parent / "store"), "max_length": 1024},
        "plan": {"token_budget": 640, "width_multiple": 16, "accumulate": 2, "max_samples": 8, **plan},
        "drafter": {"num_layers": 1, "block_size": 4, "num_anchors": 24, "dtype": "float32"},
        "optimizer": {"name": "muon", "lr": 0.02},
        "train": {"epochs": 20, "max_steps": steps},
        "flow": {"mode": "inline", "delivery": "ordered"},
        "checkpoint": {"every_steps": 1000},
        "observe": {"console": "quiet", "diagnose_every_steps": 0},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train", str(folder / "run.yaml")]) == 0
    return read_history(folder / "run")


def jitter_of(run: History) -> Jitter:
    found = explain_jitter(run)
    assert found is not None
    return found


def test_the_diagnosis_names_a_plan_that_hides_lengths(
    demo_assets: Path, skewed_chats: Path, tmp_path: Path, record_property: Any
) -> None:
    hidden = trained(tmp_path / "hidden", demo_assets, skewed_chats, strategy="bucketed", schedule="shuffled")
    level = trained(tmp_path / "level", demo_assets, skewed_chats, strategy="grid", schedule="stratified")
    named = {finding.key: finding.sentence for finding in diagnose(hidden) if finding.level == "warning"}
    assert "of the variance of the step loss comes from which lengths a step holds" in named["loss-jitter"]
    assert named["loss-jitter"].endswith("Plan.schedule: stratified would remove most of it.")
    # Of the level plan it may say what a longer window would gain, which is advice: the plan hides nothing.
    told = {finding.key for finding in diagnose(level) if finding.level == "warning"}
    assert not {"loss-jitter", "one-sided-steps"} & told
    ratio = (jitter_of(hidden).deviation / jitter_of(level).deviation) ** 2
    record_property("variance_ratio", ratio)
    assert ratio > 2
    page = write_report(hidden.run_dir).read_text(encoding="utf-8")
    assert "of the variance of the step loss" in page


def test_an_epoch_that_carries_samples_over_has_no_coverage(
    demo_assets: Path, skewed_chats: Path, tmp_path: Path
) -> None:
    """Its size is its own: measured by that of another, a whole epoch would look cut."""
    carried = trained(tmp_path / "carry", demo_assets, skewed_chats, steps=2, leftover="carry")
    assert carried.steps.tolist() == [1, 2] and "progress/epoch_coverage" not in carried.values
    whole = trained(tmp_path / "short", demo_assets, skewed_chats, steps=2)
    assert 0 < whole.series("progress/epoch_coverage")[-1] < 1
