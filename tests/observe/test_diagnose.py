"""All checks together: each sign is named, a healthy run is left alone; stages and workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from observed_runs import observed, plain_reports, shown, warnings_of
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.run_history import read_history
from paceline.types import Ratio, WorkerTotals

SLOTS = {f"accuracy/slot_{k}": Ratio(5, 10) for k in range(1, 8)}
TREE = {"acceptance/streak": Ratio(20, 10), "tree/streak_16": Ratio(19, 10)}


def test_a_healthy_run_has_no_warning(tmp_path: Path) -> None:
    assert warnings_of(observed(tmp_path, plain_reports())) == {}


@pytest.mark.parametrize(
    ("key", "changes", "phrase"),
    [
        ("skipped-steps", {"skipped": lambda step: step in (31, 40)}, "2 steps were skipped"),
        ("flat-slots", {"ratios": lambda step: SLOTS}, "slot 1 50 %, slot 7 50 %"),
        ("leak", {"ratios": lambda step: {"accuracy/all": Ratio(99, 100)}}, "labels may leak"),
        ("tree-16", {"ratios": lambda step: TREE}, "than the chain (τ 3.00)"),
        ("gradient-spikes", {"gradient_norm": lambda step: 9.0 if step == 45 else 0.5 + step % 7 / 70}, "step 45 ("),
        ("padding", {"padded_tokens": lambda step: 10**6}, "the rest is padding"),
    ],
)
def test_each_sign_is_named(tmp_path: Path, key: str, changes: dict, phrase: str) -> None:
    found = warnings_of(observed(tmp_path, plain_reports(**changes)))
    assert phrase in found.get(key, ""), found
    assert set(found) == {key}


def test_warnings_are_shown_once_while_a_run_continues(tmp_path: Path) -> None:
    skipped = {"skipped": lambda step: step == 9}
    assert shown(observed(tmp_path / "off", plain_reports(**skipped), diagnose_every_steps=0)) == []
    assert len(shown(observed(tmp_path / "on", plain_reports(**skipped), diagnose_every_steps=20))) == 1


def test_the_last_step_is_always_looked_at(tmp_path: Path) -> None:
    run_dir = observed(tmp_path, plain_reports(skipped=lambda step: step == 50))
    assert any("1 step was skipped" in text for text in shown(run_dir))


@pytest.mark.parametrize(
    ("waits", "phrase"),
    [
        ({"target/busy": 0.95, "target/blocked": 0.05, "drafter/busy": 0.4, "drafter/starved": 0.6}, "The target"),
        ({"target/busy": 0.3, "target/blocked": 0.7, "drafter/busy": 0.98}, "The drafter is the bottleneck: busy 98 %"),
        ({"target/busy": 0.7, "drafter/busy": 0.29}, "The stages take turns"),
        ({"target/busy": 0.6, "target/starved": 0.4, "drafter/busy": 0.5, "drafter/starved": 0.5}, "No stage is"),
    ],
)
def test_the_bottleneck_is_named(tmp_path: Path, waits: dict[str, float], phrase: str) -> None:
    run_dir = observed(tmp_path, plain_reports(30, seconds=lambda step: 1.0, waits_s=lambda step: waits))
    assert any(f.key == "bottleneck" and phrase in f.text for f in diagnose(read_history(run_dir)))


def workers(speeds: dict[str, float], rng: np.random.Generator) -> dict[str, WorkerTotals]:
    """What workers of these speeds, in real tokens a second of work, did in a step; 5 % of scatter."""
    found = {}
    for name, speed in speeds.items():
        tokens = int(rng.integers(800, 1200))
        found[name] = WorkerTotals(2, tokens, tokens / speed * float(rng.uniform(0.95, 1.05)))
    return found


@pytest.mark.parametrize(
    ("slow_from", "slow_to", "named"), [(0, 100, True), (80, 100, False), (0, 0, False), (45, 60, False)]
)
def test_a_worker_slow_for_long_is_named_once(tmp_path: Path, slow_from: int, slow_to: int, named: bool) -> None:
    rng = np.random.default_rng(0)

    def speeds(step: int) -> dict[str, WorkerTotals]:
        slow = 780.0 if slow_from <= step < slow_to else 1000.0
        return workers({"target_0": 1000.0, "target_1": slow, "target_2": 1000.0, "drafter_0": 300.0}, rng)

    run_dir = observed(tmp_path, plain_reports(100, workers=speeds), diagnose_every_steps=10)
    found = [text for text in shown(run_dir) if "is slow" in text]
    assert len(found) == named
    if named:
        assert found[0].startswith("Worker target_1 is slow: it makes 7") and "over the last 60 steps" in found[0]


def test_a_worker_without_work_is_not_called_slow(tmp_path: Path) -> None:
    totals = {"target_0": WorkerTotals(2, 1000, 0.5), "target_1": WorkerTotals()}
    assert warnings_of(observed(tmp_path, plain_reports(100, workers=lambda step: totals))) == {}


@pytest.mark.parametrize("steps", [3, 40])
def test_a_failure_is_named_however_short_the_run(tmp_path: Path, steps: int) -> None:
    run_dir = observed(tmp_path, plain_reports(steps), status="failed: target 0: out of memory")
    sentence = warnings_of(run_dir)["failure"]
    assert sentence.startswith(
        f"The run failed: target 0: out of memory, after step {steps}. Fix that and start it again"
    )
