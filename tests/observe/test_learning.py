"""Whether a drafter learns: a loss that rises, one that stays where it was, and trends of short runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from observe.step_reports import Sample, report_of
from paceline.config import ObserveConfig
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.diagnosis.trend import trend_of
from paceline.observe.metrics_file import EventLine, read_lines
from paceline.observe.observer import open_observer
from paceline.observe.run_history import read_history
from paceline.report.report import write_report
from paceline.types import Ratio

Curve = Callable[[int], float]


def run_of(run_dir: Path, loss: Curve, accuracy: Curve, steps: int = 240, noise: float = 0.05, every: int = 1) -> Path:
    rng = np.random.default_rng(0)
    settings = ObserveConfig(console="quiet", every_steps=every, diagnose_every_steps=60)
    observer = open_observer(settings, run_dir, total_steps=steps, header={})
    for step in range(1, steps + 1):
        value = loss(step) + noise * float(rng.normal())
        samples = [Sample(bucket, 100, value, 4) for bucket in range(2)]
        ratios = {f"accuracy/slot_{slot}": Ratio(100 * accuracy(step) * 0.8**slot, 100.0) for slot in range(1, 6)}
        norm = float(rng.lognormal(-0.7, 0.1))
        observer.step(report_of(step, samples, ratios=ratios, gradient_norm=norm))
    observer.close()
    return run_dir


def told(run_dir: Path) -> list[str]:
    lines = read_lines(run_dir / "metrics.jsonl")[0]
    return [line.fields["text"] for line in lines if isinstance(line, EventLine) and line.event == "warning"]


def warnings_of(run_dir: Path) -> dict[str, str]:
    return {finding.key: finding.sentence for finding in diagnose(read_history(run_dir)) if finding.level == "warning"}


def falling(step: int) -> float:
    return 2.0 + 6.0 * float(np.exp(-step / 40))


def learnt(step: int) -> float:
    return 0.8 * (1 - float(np.exp(-step / 40)))


@pytest.mark.parametrize("every", [1, 10])
def test_a_rising_loss_is_a_warning_live_and_in_the_report(tmp_path: Path, every: int) -> None:
    rising = lambda step: falling(step) + max(step - 120, 0) / 100  # noqa: E731
    run_dir = run_of(tmp_path, rising, learnt, every=every)
    assert warnings_of(run_dir)["loss-rising"].startswith("The loss rises: +")
    assert sum("The loss rises" in text for text in told(run_dir)) == 1
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "<b>Warning</b>The loss rises" in page and "Lower optimizer.lr" in page


@pytest.mark.parametrize("every", [1, 10])
def test_a_drafter_that_learns_nothing_is_a_warning_live_and_in_the_report(tmp_path: Path, every: int) -> None:
    run_dir = run_of(tmp_path, lambda step: 8.0, lambda step: 0.001, every=every)
    text = warnings_of(run_dir)["learns-nothing"]
    assert text.startswith("The drafter learns nothing: loss ") and "right 0.1 % of the time" in text
    assert sum("learns nothing" in line for line in told(run_dir)) == 1
    assert "<b>Warning</b>The drafter learns nothing" in write_report(run_dir).read_text(encoding="utf-8")


def test_a_drafter_that_stays_at_chance_after_a_first_fall_learns_nothing(tmp_path: Path) -> None:
    """It has found the commonest tokens and no more."""
    run_dir = run_of(tmp_path, lambda step: 6.5 + 5 * float(np.exp(-step / 8)), lambda step: 0.04)
    assert "learns-nothing" in warnings_of(run_dir)


@pytest.mark.parametrize("seed_step", [0, 3])
def test_a_drafter_that_learns_is_left_alone(tmp_path: Path, seed_step: int) -> None:
    run_dir = run_of(tmp_path, lambda step: falling(step + seed_step), learnt, noise=0.15)
    assert not {"learns-nothing", "loss-rising"} & set(warnings_of(run_dir)) and told(run_dir) == []


def test_a_flat_loss_at_the_end_is_no_warning(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, lambda step: falling(min(step, 100)), learnt, noise=0.1)
    assert not {"learns-nothing", "loss-rising"} & set(warnings_of(run_dir))


@pytest.mark.parametrize(("accuracy", "warned"), [(0.6, False), (0.001, True)])
def test_a_run_that_begins_with_learnt_weights_may_stay_where_it_is(
    tmp_path: Path, accuracy: float, warned: bool
) -> None:
    run_dir = run_of(tmp_path, lambda step: 2.0, lambda step: accuracy)
    assert "learns-nothing" in warnings_of(run_dir)
    (run_dir / "settings.yaml").write_text("drafter: {init: other}\n")
    assert ("learns-nothing" in warnings_of(run_dir)) == warned


def test_warm_up_is_waited_for(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, lambda step: 8.0, lambda step: 0.001, steps=240)
    (run_dir / "settings.yaml").write_text("optimizer: {warmup: 0.9}\n")
    assert "learns-nothing" in warnings_of(run_dir)  # the run is over and warm-up with it
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace('"total_steps":240', '"total_steps":2400'))
    assert "learns-nothing" not in warnings_of(run_dir)


@pytest.mark.parametrize(
    ("entry", "verdict"),
    [
        ({"tau_micro": 2.5, "training_tau": 2.49, "training_agrees": True}, "yes"),
        ({"tau_micro": 2.5, "training_tau": 2.4, "training_agrees": False}, "no"),
        ({"tau_micro": 2.5, "training_tau": 2.56}, "no"),
        ({"tau_micro": 2.5, "training_tau": 2.53}, "yes"),
        ({"tau_micro": 2.5, "training_tau": None, "training_agrees": None}, "not measured"),
    ],
)
def test_the_report_holds_training_against_decoding(tmp_path: Path, entry: dict[str, Any], verdict: str) -> None:
    run_dir = run_of(tmp_path, falling, learnt, steps=60)
    (run_dir / "evaluation.json").write_text(json.dumps({"evaluations": [{"step": 60} | entry]}))
    page = write_report(run_dir).read_text(encoding="utf-8")
    row = '<th scope="row">training and decoding within 2 %</th>'
    assert (f"{row}<td>{verdict}</td>" in page) == (verdict != "not measured")
    assert ("training-against-decoding" in warnings_of(run_dir)) == (verdict == "no")
    assert ("the training forward counts" in page) == (verdict == "no")


@pytest.mark.parametrize("count", [8, 12, 20, 40])
def test_short_series_have_a_trend_with_a_wider_interval(count: int) -> None:
    steps = np.arange(1, count + 1)
    hits = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        trend = trend_of(steps, 2.0 - 1e-2 * steps + 0.05 * rng.normal(size=count))
        assert trend is not None
        hits += abs(trend.slope + 1e-2) <= trend.error
    assert 0.92 <= hits / 400 <= 0.98


def test_seven_points_have_no_trend() -> None:
    assert trend_of(np.arange(7), np.arange(7.0)) is None
