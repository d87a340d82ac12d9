"""Whether a drafter learns, and whether it learns what serving needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from observed_runs import Sample, observed, plain_reports, report_of, shown, warnings_of
from paceline.observe.diagnosis.learning import trend_of
from paceline.types import Ratio, StepReport

Curve = Callable[[int], float]


def course(run_dir: Path, loss: Curve, accuracy: Curve, steps: int = 240, noise: float = 0.05, every: int = 1) -> Path:
    """A run whose loss and accuracy follow curves."""
    rng = np.random.default_rng(0)

    def report(step: int) -> StepReport:
        value = loss(step) + noise * float(rng.normal())
        samples = [Sample(bucket, 100, value, 4) for bucket in range(2)]
        ratios = {f"accuracy/slot_{slot}": Ratio(100 * accuracy(step) * 0.8**slot, 100.0) for slot in range(1, 6)}
        return report_of(step, samples, ratios=ratios, gradient_norm=float(rng.lognormal(-0.7, 0.1)))

    reports = [report(step) for step in range(1, steps + 1)]
    return observed(run_dir, reports, header={}, every_steps=every, diagnose_every_steps=60)


def falling(step: int) -> float:
    return 2.0 + 6.0 * float(np.exp(-step / 40))


def learnt(step: int) -> float:
    return 0.8 * (1 - float(np.exp(-step / 40)))


@pytest.mark.parametrize("every", [1, 10])
def test_a_rising_loss_is_a_warning(tmp_path: Path, every: int) -> None:
    run_dir = course(tmp_path, lambda step: falling(step) + max(step - 120, 0) / 100, learnt, every=every)
    assert warnings_of(run_dir)["loss-rising"].startswith("The loss rises: +")
    assert sum("The loss rises" in text for text in shown(run_dir)) == 1


@pytest.mark.parametrize("every", [1, 10])
def test_a_drafter_that_learns_nothing_is_a_warning(tmp_path: Path, every: int) -> None:
    run_dir = course(tmp_path, lambda step: 8.0, lambda step: 0.001, every=every)
    text = warnings_of(run_dir)["learns-nothing"]
    assert text.startswith("The drafter learns nothing: loss ") and "right 0.1 % of the time" in text
    assert f"run `paceline check {run_dir}`" in text
    assert sum("learns nothing" in line for line in shown(run_dir)) == 1


def test_a_drafter_that_stays_at_chance_learns_nothing(tmp_path: Path) -> None:
    """It has found the commonest tokens and no more."""
    run_dir = course(tmp_path, lambda step: 6.5 + 5 * float(np.exp(-step / 8)), lambda step: 0.04)
    assert "learns-nothing" in warnings_of(run_dir)


@pytest.mark.parametrize("later", [0, 3])
def test_a_drafter_that_learns_is_left_alone(tmp_path: Path, later: int) -> None:
    run_dir = course(tmp_path, lambda step: falling(step + later), learnt, noise=0.15)
    assert not {"learns-nothing", "loss-rising"} & set(warnings_of(run_dir)) and shown(run_dir) == []


def test_a_flat_loss_at_the_end_is_not_a_warning(tmp_path: Path) -> None:
    run_dir = course(tmp_path, lambda step: falling(min(step, 100)), learnt, noise=0.1)
    assert not {"learns-nothing", "loss-rising"} & set(warnings_of(run_dir))


@pytest.mark.parametrize(("accuracy", "warned"), [(0.6, False), (0.001, True)])
def test_learnt_weights_may_stay_where_they_are(tmp_path: Path, accuracy: float, warned: bool) -> None:
    run_dir = course(tmp_path, lambda step: 2.0, lambda step: accuracy)
    assert "learns-nothing" in warnings_of(run_dir)
    (run_dir / "settings.yaml").write_text("drafter: {init: other}\n")
    assert ("learns-nothing" in warnings_of(run_dir)) == warned


def test_warm_up_is_waited_for(tmp_path: Path) -> None:
    run_dir = course(tmp_path, lambda step: 8.0, lambda step: 0.001)
    (run_dir / "settings.yaml").write_text("optimizer: {warmup: 0.9}\n")
    assert "learns-nothing" in warnings_of(run_dir)  # the run is over and warm-up with it
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace('"total_steps":240', '"total_steps":2400'))
    assert "learns-nothing" not in warnings_of(run_dir)


def test_too_good_to_be_true_names_the_command(tmp_path: Path) -> None:
    reports = plain_reports(ratios=lambda step: {"accuracy/all": Ratio(99, 100)})
    found = warnings_of(observed(tmp_path, reports))
    assert "too good to be true" in found["leak"] and f"`paceline check {tmp_path}`" in found["leak"]


def test_slots_that_are_right_by_memory_may_be_flat(tmp_path: Path) -> None:
    slots = {f"accuracy/slot_{slot}": Ratio(990 - slot, 1000) for slot in range(1, 8)}
    sentence = warnings_of(observed(tmp_path, plain_reports(ratios=lambda step: slots)))["flat-slots"]
    assert "A run that has memorized its few samples may look so" in sentence


def test_a_tree_is_compared_with_the_chain_of_its_steps(tmp_path: Path) -> None:
    """Trees are measured now and then, here on a step whose chain is shorter than usual."""

    def ratios(step: int) -> dict[str, Ratio]:
        measured = {} if step % 50 else {"tree/streak_16": Ratio(18, 10)}
        return {"acceptance/streak": Ratio(30 if step % 50 else 15, 10)} | measured

    assert "tree-16" not in warnings_of(observed(tmp_path, plain_reports(100, ratios=ratios)))


def test_a_tree_of_few_nodes_may_accept_less(tmp_path: Path) -> None:
    slots = {f"accuracy/slot_{slot}": Ratio(95 - slot, 100) for slot in range(1, 32)}
    ratios = slots | {"acceptance/streak": Ratio(200, 10), "tree/streak_16": Ratio(150, 10)}
    assert "tree-16" not in warnings_of(observed(tmp_path, plain_reports(40, ratios=lambda step: ratios)))


def evaluated(run_dir: Path, *entries: dict[str, Any]) -> Path:
    (run_dir / "evaluation.json").write_text(json.dumps({"evaluations": list(entries)}))
    return run_dir


def streak(step: int) -> dict[str, Ratio]:
    return {"acceptance/streak": Ratio(20, 10)}


def test_decoding_far_below_training_is_named(tmp_path: Path) -> None:
    run_dir = observed(tmp_path, plain_reports(ratios=streak))
    assert warnings_of(evaluated(run_dir, {"step": 60, "tau_micro": 2.9})) == {}
    sentence = warnings_of(evaluated(run_dir, {"step": 60, "tau_micro": 1.5}))["decoded-below-training"]
    assert "decode with τ 1.50 where training reports 3.00" in sentence and "template" in sentence
    same = {"step": 60, "tau_micro": 1.5, "training_tau": 1.5, "training_agrees": True}
    sentence = warnings_of(evaluated(run_dir, same))["decoded-below-training"]
    assert "held-out prompts are not like the training rows" in sentence and "template" not in sentence


def test_rows_that_were_seen_often_may_be_memorized(tmp_path: Path) -> None:
    reports = [replace(report, epoch=report.step // 15) for report in plain_reports(ratios=streak)]
    run_dir = observed(tmp_path, reports, header={})
    entry = {"step": 60, "tau_micro": 1.5, "training_tau": 1.5, "training_agrees": True}
    assert "memorizes rows that it saw 5 times" in warnings_of(evaluated(run_dir, entry))["decoded-below-training"]


def rising_tau(step: int) -> dict[str, Ratio]:
    return {"acceptance/streak": Ratio(10 + 20 * step / 120, 10)}


@pytest.mark.parametrize(
    ("held_out", "word"),
    [
        ([1.5, 2.0, 2.2, 2.2, 2.1, 2.0], "falls"),
        ([1.5, 2.0, 2.2, 2.2, 2.2, 2.2], "stays"),
        ([1.5, 2.0, 2.2, 2.4, 2.6, 2.8], ""),
    ],
)
def test_memorizing_is_named(tmp_path: Path, held_out: list[float], word: str) -> None:
    run_dir = observed(tmp_path, plain_reports(120, ratios=rising_tau))
    entries = [{"step": 20 * place, "tau_micro": tau, "training_agrees": True} for place, tau in enumerate(held_out, 1)]
    found = warnings_of(evaluated(run_dir, {"step": 0, "tau_micro": 1.0}, *entries))
    assert ("memorizing" in found) == bool(word)
    if word:
        assert (
            "training τ rises from 3.1" in found["memorizing"] and f"held-out τ {word} (2.20, " in found["memorizing"]
        )
        assert "best at step 60: 2.20" in found["memorizing"]


def test_memorizing_is_seen_in_validation_batches(tmp_path: Path) -> None:
    def ratios(step: int) -> dict[str, Ratio]:
        validated = {"validation/acceptance/streak": Ratio(10, 10)} if step % 10 == 0 else {}
        return rising_tau(step) | validated

    sentence = warnings_of(observed(tmp_path, plain_reports(120, ratios=ratios)))["memorizing"]
    assert "held-out τ stays (2.00, 2.00)" in sentence
    assert any("memorizes" in text for text in shown(observed(tmp_path / "live", plain_reports(120, ratios=ratios))))


@pytest.mark.parametrize("count", [8, 12, 20, 40, 1000])
def test_a_trend_interval_holds_the_slope_95_times_in_100(count: int) -> None:
    steps = np.arange(1, count + 1)
    hits = 0
    for seed in range(400):
        trend = trend_of(steps, 2.0 - 1e-2 * steps + 0.05 * np.random.default_rng(seed).normal(size=count))
        assert trend is not None
        hits += abs(trend.slope + 1e-2) <= trend.error
    assert 0.92 <= hits / 400 <= 0.98


def test_trends_have_a_direction() -> None:
    steps = np.arange(1, 401)
    noise = 0.01 * np.random.default_rng(0).normal(size=400)
    curves = (noise, noise - steps / 1000, noise + steps / 1000)
    trends = [trend_of(steps, values) for values in curves]
    assert [trend.direction for trend in trends if trend] == ["flat", "falling", "rising"]
    assert trend_of(steps[:7], noise[:7]) is None
