from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from observe.simulated_runs import simulate
from observe.step_reports import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.diagnosis.loss_variance import explain_jitter
from paceline.observe.diagnosis.trend import trend_of
from paceline.observe.metrics_file import EventLine, read_lines
from paceline.observe.observer import open_observer
from paceline.observe.run_history import read_history
from paceline.report.report import write_report
from paceline.types import Ratio


def warnings_of(run_dir: Path) -> dict[str, str]:
    return {finding.key: finding.sentence for finding in diagnose(read_history(run_dir)) if finding.level == "warning"}


def told(run_dir: Path) -> list[str]:
    lines = read_lines(run_dir / "metrics.jsonl")[0]
    return [line.fields["text"] for line in lines if isinstance(line, EventLine) and line.event == "warning"]


def run_of(run_dir: Path, reports, **settings) -> Path:
    reports = list(reports)
    observer = open_observer(
        ObserveConfig(console="quiet", **settings), run_dir, total_steps=len(reports), header={"samples_per_epoch": 12}
    )
    for report in reports:
        observer.step(report)
    observer.close()
    return run_dir


def plain_reports(count: int = 60, **changes):
    rng = np.random.default_rng(0)
    for step in range(1, count + 1):
        samples = [replace(sample, loss=3.0 + 2.0 * np.exp(-step / 10)) for sample in random_samples(rng)]
        yield report_of(step, samples, **{key: make(step) for key, make in changes.items()})


def test_the_story_which_lengths_train_when(tmp_path, record_property):
    bad = simulate(tmp_path / "bad", "bucketed", "shuffled", diagnose_every_steps=40)
    good = simulate(tmp_path / "good", "grid", "stratified", diagnose_every_steps=40)
    sentence = warnings_of(bad)["loss-jitter"]
    assert "of the variance of the step loss comes from which lengths a step holds" in sentence
    assert sentence.endswith("Plan.schedule: stratified would remove most of it.")
    assert set(warnings_of(good)) == set()
    before, after = explain_jitter(read_history(bad)), explain_jitter(read_history(good))
    # Long samples have the lower loss, so short buckets push it up and long ones down.
    assert before.explained > 0.9 and before.slope * (2.5 - int(before.leader.split()[1])) > 0
    ratio = before.deviation**2 / after.deviation**2
    record_property("variance_ratio", ratio)
    assert ratio > 5
    # Told live, once, and never in the other run.
    assert sum("variance of the step loss" in text for text in told(bad)) == 1
    assert told(good) == []


def test_without_an_effect_of_length_nobody_is_named(tmp_path):
    run_dir = simulate(tmp_path, "bucketed", "shuffled", length_effect=0.0)
    assert "loss-jitter" not in warnings_of(run_dir)
    assert explain_jitter(read_history(run_dir)).explained < 0.2


def test_jitter_equals_a_regression_written_out(tmp_path):
    run = read_history(simulate(tmp_path, "bucketed", "shuffled", epochs=3))
    later = run.steps > 0.1 * run.total_steps
    loss = run.series("loss")[later]
    shares = np.array([run.counts(f"weight_share/bucket_{bucket}")[later] for bucket in range(6)]).T
    rows, goal = [], []
    for i in range(1, loss.size - 1):
        goal.append(loss[i] - (loss[i - 1] + loss[i + 1]) / 2)
        rows.append([*(shares[i, 1:] - (shares[i - 1, 1:] + shares[i + 1, 1:]) / 2), 1.0])
    design, goal = np.array(rows), np.array(goal)
    rest = goal - design @ np.linalg.solve(design.T @ design, design.T @ goal)
    r_squared = 1 - rest @ rest / np.sum((goal - goal.mean()) ** 2)
    expected = 1 - (1 - r_squared) * (goal.size - 1) / (goal.size - 6)
    assert explain_jitter(run).explained == pytest.approx(expected, abs=1e-6)


def test_jitter_of_white_noise_has_the_deviation_of_the_noise(tmp_path):
    rng = np.random.default_rng(1)
    reports = [report_of(1, random_samples(rng)) for _ in range(3000)]
    losses = 3.0 - np.arange(3000) / 2000 + 0.05 * rng.normal(size=3000)
    run_dir = run_of(
        tmp_path,
        (replace(r, step=i + 1, loss=Ratio(losses[i] * 10, 10.0)) for i, r in enumerate(reports)),
        diagnose_every_steps=0,
    )
    assert explain_jitter(read_history(run_dir)).deviation == pytest.approx(0.05, rel=0.05)


def test_a_healthy_run_has_no_warning(tmp_path):
    assert warnings_of(run_of(tmp_path, plain_reports())) == {}


SLOTS = {f"accuracy/slot_{k}": Ratio(5, 10) for k in range(1, 8)}
STREAK = {"acceptance/streak": Ratio(20, 10)}


@pytest.mark.parametrize(
    ("key", "changes", "phrase"),
    [
        ("skipped-steps", {"skipped": lambda step: step in (31, 40)}, "2 steps were skipped"),
        ("flat-slots", {"ratios": lambda step: SLOTS}, "slot 1 50 %, slot 7 50 %"),
        ("leak", {"ratios": lambda step: {"accuracy/all": Ratio(99, 100)}}, "labels may leak"),
        ("tree-16", {"ratios": lambda step: STREAK | {"tree/streak_16": Ratio(19, 10)}}, "than the chain (τ 3.00)"),
        ("gradient-spikes", {"gradient_norm": lambda step: 9.0 if step == 45 else 0.5 + step % 7 / 70}, "step 45 ("),
        ("padding", {"padded_tokens": lambda step: 10**6}, "the rest is padding"),
    ],
)  # fmt: skip
def test_each_sign_is_named(tmp_path, key, changes, phrase):
    found = warnings_of(run_of(tmp_path, plain_reports(**changes)))
    assert phrase in found.get(key, ""), found
    assert set(found) == {key}


def test_frozen_norms_are_named_after_enough_steps(tmp_path):
    ratios = {"norms/unmoved": Ratio(78, 100)}
    assert "frozen-norms" not in warnings_of(run_of(tmp_path / "a", plain_reports(60, ratios=lambda step: ratios)))
    found = warnings_of(run_of(tmp_path / "b", plain_reports(220, ratios=lambda step: ratios)))
    assert found["frozen-norms"].startswith("78 % of the norm weights still have their first value after 220 steps")


def test_steps_of_one_bucket_are_named(tmp_path):
    rng = np.random.default_rng(0)

    def reports():
        for step in range(1, 61):
            samples = random_samples(rng, 40)
            if step % 2:
                samples = [sample for sample in samples if sample.bucket == 3]
            totals = report_of(step, [replace(s, loss=3.0) for s in samples])
            yield replace(totals, buckets={b: replace(t, micro_batches=2) for b, t in totals.buckets.items()})

    found = warnings_of(run_of(tmp_path, reports()))
    assert found["one-sided-steps"].startswith(
        "50 % of the steps saw samples of one length bucket only, most often bucket 3"
    )


def test_an_epoch_with_samples_left_out_is_named(tmp_path):
    rng = np.random.default_rng(0)
    reports = (report_of(s, random_samples(rng, 3), epoch=(s - 1) // 30) for s in range(1, 61))
    observer_dir = run_of(tmp_path, (replace(r, loss=Ratio(3.0, 1.0)) for r in reports))
    text = (observer_dir / "metrics.jsonl").read_text()
    assert "coverage" not in warnings_of(observer_dir)
    # 90 samples were trained of 12 announced; announce 100.
    path = observer_dir / "metrics.jsonl"
    path.write_text(text.replace('"progress/epoch_coverage":7.5', '"progress/epoch_coverage":0.9'))
    assert "An epoch ended with 90 % of its samples trained" in warnings_of(observer_dir)["coverage"]


def test_decoding_below_training_is_named(tmp_path):
    run_dir = run_of(tmp_path, plain_reports(ratios=lambda step: STREAK))
    path = run_dir / "evaluation.json"
    path.write_text('{"evaluations": [{"step": 60, "tau_micro": 2.9}]}')
    assert warnings_of(run_dir) == {}
    path.write_text('{"evaluations": [{"step": 60, "tau_micro": 1.5}]}')
    assert "Decoding gets τ 1.50 where training reports 3.00" in warnings_of(run_dir)["decoded-below-training"]


@pytest.mark.parametrize(
    ("waits", "phrase"),
    [
        ({"target/busy": 0.95, "target/blocked": 0.05, "drafter/busy": 0.4, "drafter/starved": 0.6}, "The target"),
        ({"target/busy": 0.3, "target/blocked": 0.7, "drafter/busy": 0.98}, "The drafter is the bottleneck: busy 98 %"),
        ({"target/busy": 0.7, "drafter/busy": 0.29}, "The stages take turns"),
        ({"target/busy": 0.6, "target/starved": 0.4, "drafter/busy": 0.5, "drafter/starved": 0.5}, "No stage is"),
    ],
)  # fmt: skip
def test_the_bottleneck_is_named(tmp_path, waits, phrase):
    run_dir = run_of(tmp_path, plain_reports(30, seconds=lambda step: 1.0, waits_s=lambda step: waits))
    assert any(f.key == "bottleneck" and phrase in f.text for f in diagnose(read_history(run_dir)))


def test_a_trend_interval_holds_the_true_slope_about_95_times_in_100():
    steps = np.arange(1, 1001)
    hits = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        trend = trend_of(steps, 2.0 - 1e-4 * steps + 0.05 * rng.normal(size=1000))
        hits += abs(trend.slope + 1e-4) <= trend.error
    assert 0.92 <= hits / 400 <= 0.98


def test_trends_are_put_in_words():
    steps = np.arange(1, 401)
    rng = np.random.default_rng(0)
    noise = 0.01 * rng.normal(size=400)
    assert trend_of(steps, noise).text == "flat"
    assert trend_of(steps, noise - steps / 1000).text == "still falling"
    assert trend_of(steps, noise + steps / 1000).text == "still rising"
    assert trend_of(steps[:7], noise[:7]) is None


def test_the_report_shows_findings_and_what_to_do_next(tmp_path):
    text = write_report(
        run_of(tmp_path, plain_reports(skipped=lambda step: step > 58, clipped=lambda _: True))
    ).read_text()
    assert '<li class="warning"><b>Warning</b>2 steps were skipped' in text
    assert '<li class="info"><b>Note</b>100\u00a0% of the gradients were clipped' in text  # as in many a good run
    assert "<li>Lower optimizer.lr or look at the samples of that step.</li>" in text


def test_live_warnings_can_be_switched_off(tmp_path):
    run_dir = run_of(tmp_path, plain_reports(skipped=lambda step: step == 9), diagnose_every_steps=0)
    assert told(run_dir) == []
    run_dir = run_of(tmp_path / "on", plain_reports(skipped=lambda step: step == 9), diagnose_every_steps=20)
    assert len(told(run_dir)) == 1
