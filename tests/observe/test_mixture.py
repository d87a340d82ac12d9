"""What steps hold and whether it makes the loss jump: named however buckets and lines are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from observed_runs import Sample, observed, plain_reports, random_samples, report_of, shown, simulate, warnings_of
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.diagnosis.mixture import explain_jitter, variance_of_windows
from paceline.observe.metrics_file import StepLine, read_lines
from paceline.observe.run_history import read_history
from paceline.types import BucketTotals, Ratio, StepReport, TagTotals


def step_of(step: int, micro_batches: dict[int, int], **changes: object) -> StepReport:
    """A step with so many micro-batches of each bucket; its loss does not depend on them."""
    level = 3.0 + 2.0 * np.exp(-step / 10)
    samples = [Sample(bucket, 100, level, 4) for bucket, count in micro_batches.items() for _ in range(2 * count)]
    report = report_of(step, samples, **changes)
    totals: dict[int, BucketTotals] = {
        bucket: replace(total, micro_batches=micro_batches[bucket]) for bucket, total in report.buckets.items()
    }
    return replace(report, buckets=totals)


def one_sided(steps: int) -> Iterator[StepReport]:
    """Every second step sees the longest bucket only; over a few steps the mixture looks level."""
    for step in range(1, steps + 1):
        yield step_of(step, {3: 4} if step % 2 else {0: 2, 1: 1, 2: 1})


def run_of(run_dir: Path, reports: Iterator[StepReport], every: int, **plan: object) -> Path:
    return observed(
        run_dir, reports, header={}, settings={"plan": plan}, every_steps=every, diagnose_every_steps=40
    )  # fmt: skip


def tagged(report: StepReport, shares: dict[str, float], losses: dict[str, float], samples: int = 6) -> StepReport:
    """The report with its weight split over tags, each with its loss."""
    whole = report.loss.denominator
    tags = {tag: TagTotals(Ratio(losses[tag] * share * whole, share * whole), samples) for tag, share in shares.items()}
    return replace(report, tags=tags, loss=Ratio(sum(totals.loss.numerator for totals in tags.values()), whole))


def test_the_plan_that_hides_lengths_is_named(tmp_path: Path, record_property: Any) -> None:
    bad = simulate(tmp_path / "bad", "bucketed", "shuffled", diagnose_every_steps=40)
    good = simulate(tmp_path / "good", "grid", "stratified", diagnose_every_steps=40)
    sentence = warnings_of(bad)["loss-jitter"]
    assert "of the variance of the step loss comes from which lengths a step holds" in sentence
    assert sentence.endswith("Plan.schedule: stratified would remove most of it.")
    assert set(warnings_of(good)) == set()
    before, after = explain_jitter(read_history(bad)), explain_jitter(read_history(good))
    assert before is not None and after is not None
    # Long samples have the lower loss, so short buckets push it up and long ones down.
    assert before.explained > 0.9 and before.slope * (2.5 - int(before.leader.split()[1])) > 0
    ratio = before.deviation**2 / after.deviation**2
    record_property("variance_ratio", ratio)
    assert ratio > 5
    # Shown live, once, and never in the other run.
    assert sum("variance of the step loss" in text for text in shown(bad)) == 1
    assert shown(good) == []


def test_without_an_effect_of_length_nothing_is_named(tmp_path: Path) -> None:
    run_dir = simulate(tmp_path, "bucketed", "shuffled", length_effect=0.0)
    assert "loss-jitter" not in warnings_of(run_dir)
    found = explain_jitter(read_history(run_dir))
    assert found is not None and found.explained < 0.2


def test_jitter_equals_a_regression_written_out(tmp_path: Path) -> None:
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
    found = explain_jitter(run)
    assert found is not None
    assert found.explained == pytest.approx(1 - (1 - r_squared) * (goal.size - 1) / (goal.size - 6), abs=1e-6)


def test_jitter_of_white_noise_is_the_noise(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    losses = 3.0 - np.arange(3000) / 2000 + 0.05 * rng.normal(size=3000)
    reports = (
        replace(report_of(step, random_samples(rng)), loss=Ratio(losses[step - 1] * 10, 10.0))
        for step in range(1, 3001)
    )
    found = explain_jitter(read_history(observed(tmp_path, reports, diagnose_every_steps=0)))
    assert found is not None and found.deviation == pytest.approx(0.05, rel=0.05)


def test_what_windows_must_have_equals_counting_them(tmp_path: Path) -> None:
    """Oracle: all windows of two micro-batches, one from the shorter half of all of them and one from the longer."""
    pattern = [(0, 2), (0, 3), (1, 2), (1, 3)]
    loss, anchors = {0: 5.0, 1: 4.0, 2: 3.0, 3: 1.0}, {0: 4, 1: 8, 2: 12, 3: 40}
    reports = []
    for step in range(1, 201):
        samples = [Sample(bucket, 100, loss[bucket], anchors[bucket]) for bucket in pattern[step % 4]]
        reports.append(report_of(step, samples))
    run = read_history(observed(tmp_path, reports, diagnose_every_steps=0))

    def variance(windows: list[tuple[int, int]]) -> float:
        means = [(loss[a] * anchors[a] + loss[b] * anchors[b]) / (anchors[a] + anchors[b]) for a, b in windows]
        return float(np.var(means))

    found = variance_of_windows(run, np.full(200, True), "bucket 0", 1.0)
    chance = [(a, b) for a in range(4) for b in range(4)]
    assert found == pytest.approx((variance(pattern), variance(chance)), rel=0.07)


@pytest.mark.parametrize("accumulate", [2, 3, 4, 8])
def test_a_level_plan_is_not_blamed_for_its_window_size(tmp_path: Path, accumulate: int) -> None:
    """However strongly the loss depends on lengths: windows of two micro-batches cannot all hold the same lengths."""
    run_dir = simulate(tmp_path, "grid", "stratified", accumulate=accumulate, length_effect=0.8, plan={})
    assert warnings_of(run_dir) == {}


def test_small_windows_that_jump_are_told_what_would_help(tmp_path: Path) -> None:
    run_dir = simulate(tmp_path, "grid", "stratified", accumulate=2, length_effect=0.8, plan={})
    (found,) = [finding for finding in diagnose(read_history(run_dir)) if finding.key == "loss-jitter"]
    assert found.level == "info" and "A window of 2.0 micro-batches cannot do much better." in found.text
    assert found.advice.startswith("raise plan.accumulate")


def test_a_stratified_plan_is_never_warned_of(tmp_path: Path) -> None:
    """Nothing in the plan could be done better, however the loss jumps."""
    run_dir = simulate(tmp_path, "bucketed", "shuffled", accumulate=4, length_effect=0.5, plan={})
    settings = run_dir / "settings.yaml"
    assert "loss-jitter" in warnings_of(run_dir)
    settings.write_text(settings.read_text().replace("schedule: shuffled", "schedule: stratified"))
    (found,) = [finding for finding in diagnose(read_history(run_dir)) if finding.key == "loss-jitter"]
    assert found.level == "info" and found.advice.startswith("raise plan.accumulate")


@pytest.mark.parametrize("accumulate", [2, 4, 8])
def test_a_plan_that_draws_windows_by_chance_is_named(tmp_path: Path, accumulate: int) -> None:
    run_dir = simulate(tmp_path, "bucketed", "shuffled", accumulate=accumulate, length_effect=0.5, plan={})
    assert "stratified would remove most of it" in warnings_of(run_dir)["loss-jitter"]


def test_a_tag_that_moves_the_loss_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    reports = [
        tagged(report, {"code": share, "prose": 1 - share}, {"code": 1.0, "prose": 3.0})
        for report, share in zip(plain_reports(80), rng.uniform(0.05, 0.95, 80), strict=True)
    ]
    sentence = warnings_of(observed(tmp_path, reports))["loss-jitter"]
    assert "comes from which tags a step holds, chiefly the share of tag " in sentence
    assert "spans more kinds of samples" in sentence
    found = explain_jitter(read_history(tmp_path))
    assert found is not None and found.explained > 0.99 and abs(found.slope) == pytest.approx(2.0, rel=1e-3)


def test_tags_that_vary_as_by_chance_are_not_a_warning(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    reports = [
        tagged(report, {"code": share, "prose": 1 - share}, {"code": 1.0, "prose": 3.0})
        for report, share in zip(plain_reports(80), rng.binomial(12, 0.5, 80) / 12, strict=True)
    ]
    found = [finding for finding in diagnose(read_history(observed(tmp_path, reports))) if finding.key == "loss-jitter"]
    assert [finding.level for finding in found] == ["info"]


def test_a_starved_tag_is_named_and_a_light_one_is_not(tmp_path: Path) -> None:
    losses = {"tiny": 3.0, "light": 3.0, "rest": 3.0}
    shares = {"tiny": 0.01, "light": 0.2, "rest": 0.79}
    reports = [tagged(report, shares, losses, samples=4) for report in plain_reports(40)]
    sentence = warnings_of(observed(tmp_path, reports))["starved-tags"]
    assert "tiny (33 % of the samples, 1.0 % of the loss weight)" in sentence
    assert "light" not in sentence and "rest" not in sentence


@pytest.mark.parametrize(("share", "warned"), [(0.2, True), (0.3, False)])
def test_coverage_of_supervised_tokens_counts_all_epochs(tmp_path: Path, share: float, warned: bool) -> None:
    reports = [
        replace(report, epoch=report.step // 21, ratios={**report.ratios, "coverage/supervised": Ratio(share, 1.0)})
        for report in plain_reports(40)
    ]
    run_dir = observed(tmp_path, reports, header={}, settings={"train": {"epochs": 2}})
    assert ("supervised-coverage" in warnings_of(run_dir)) == warned


@pytest.mark.parametrize(
    ("plan", "accumulate"),
    [({"edges": [4096]}, 1), ({"num_buckets": 1}, 1), ({"num_buckets": 256, "width_multiple": 1}, 2)],
)
def test_lines_and_buckets_do_not_hide_steps_of_one_length(
    tmp_path: Path, plan: dict[str, object], accumulate: int
) -> None:
    run_dir = simulate(tmp_path, "sorted", "shuffled", accumulate=accumulate, plan=plan, every_steps=50)
    assert "steps do not hold the same lengths" in warnings_of(run_dir)["one-sided-steps"]


@pytest.mark.parametrize("plan", [{"edges": [24, 4096]}, {"num_buckets": 256, "width_multiple": 1}])
def test_odd_buckets_do_not_hide_why_the_loss_jumps(tmp_path: Path, plan: dict[str, object]) -> None:
    run_dir = simulate(tmp_path, "sorted", "shuffled", accumulate=4, epochs=2, plan=plan)
    sentence = warnings_of(run_dir)["loss-jitter"]
    assert "which lengths a step holds: the loss moves by −0.2" in sentence and "as their mean doubles" in sentence


def test_a_long_run_is_told_early_why_the_loss_jumps(tmp_path: Path) -> None:
    run_dir = simulate(tmp_path, "bucketed", "shuffled", accumulate=2, epochs=7)
    path = run_dir / "metrics.jsonl"
    first, rest = path.read_text().split("\n", 1)
    planned = read_history(run_dir).total_steps
    path.write_text(first.replace(f'"total_steps":{planned}', '"total_steps":1000000') + "\n" + rest)
    assert read_history(run_dir).total_steps == 1_000_000 and planned > 540
    assert "loss-jitter" in warnings_of(run_dir)


@pytest.mark.parametrize(
    ("strategy", "plan"),
    [
        ("mixed", {"mixed_span": 6}),
        ("packed", {}),
        ("shuffled", {}),
        ("grid", {"edges": [64, 4096]}),
        ("grid", {"num_buckets": 1}),
    ],
)
def test_steps_of_all_lengths_are_not_one_sided(tmp_path: Path, strategy: str, plan: dict[str, object]) -> None:
    run_dir = simulate(tmp_path, strategy, "stratified", accumulate=4, epochs=3, plan=plan)
    assert "one-sided-steps" not in warnings_of(run_dir)


@pytest.mark.parametrize("seed", [19, 21, 29])
def test_a_level_plan_of_other_lengths_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    lengths = np.random.default_rng(seed).lognormal(5.3, 0.8, 6000).astype(np.int64).clip(16, 4096)
    monkeypatch.setattr("observed_runs.skewed_lengths", lambda: lengths)
    assert warnings_of(simulate(tmp_path, "grid", "stratified", accumulate=4, epochs=4)) == {}


def test_a_curriculum_is_not_asked_to_be_level(tmp_path: Path) -> None:
    plan = {"curriculum_share": 1.0, "curriculum_stages": 200}
    run_dir = simulate(tmp_path, "grid", "curriculum", accumulate=2, plan=plan)
    found = {finding.key: finding for finding in diagnose(read_history(run_dir))}
    assert found["one-sided-steps"].level == "info"
    assert "curriculum asks for it" in found["one-sided-steps"].advice
    assert "by intent" in found["loss-jitter"].advice


def test_one_micro_batch_a_step_needs_more_not_another_schedule(tmp_path: Path) -> None:
    run_dir = simulate(tmp_path, "bucketed", "shuffled", accumulate=1, plan={})
    assert "Raise plan.accumulate." in warnings_of(run_dir)["one-sided-steps"]
    (found,) = [finding for finding in diagnose(read_history(run_dir)) if finding.key == "loss-jitter"]
    assert found.level == "info" and found.advice == "raise plan.accumulate, so that a window spans more lengths"


def test_steps_of_one_bucket_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def reports() -> Iterator[StepReport]:
        for step in range(1, 61):
            samples = random_samples(rng, 40)
            if step % 2:
                samples = [sample for sample in samples if sample.bucket == 3]
            totals = report_of(step, [replace(s, loss=3.0) for s in samples])
            yield replace(totals, buckets={b: replace(t, micro_batches=2) for b, t in totals.buckets.items()})

    text = warnings_of(observed(tmp_path, reports()))["one-sided-steps"]
    assert text.startswith("50 % of the steps saw samples of one length bucket only, most often bucket 3")


@pytest.mark.parametrize("every", [1, 2, 10, 60])
def test_one_sided_steps_are_named_in_lines_of_any_size(tmp_path: Path, every: int) -> None:
    run_dir = run_of(tmp_path / "bad", one_sided(120), every)
    text = warnings_of(run_dir)["one-sided-steps"]
    assert text.startswith("50 % of the steps saw samples of one length bucket only, most often bucket 3")
    assert any("one length bucket only" in text for text in shown(run_dir))
    level = (step_of(step, {0: 1, 1: 1, 2: 1, 3: 1}) for step in range(1, 121))
    assert warnings_of(run_of(tmp_path / "good", level, every)) == {}


@pytest.mark.parametrize("every", [1, 10])
def test_steps_of_three_in_four_from_one_bucket_are_named(tmp_path: Path, every: int) -> None:
    lopsided = (step_of(step, {step % 4: 3, (step + 1) % 4: 1}) for step in range(1, 121))
    text = warnings_of(run_of(tmp_path, lopsided, every))["one-sided-steps"]
    assert text.startswith("100 % of the steps drew at least three of four micro-batches from one length bucket")
    assert "2.0 of 4 buckets" in text


def test_most_of_the_data_may_be_most_of_a_step(tmp_path: Path) -> None:
    reports = (step_of(step, {0: 3, 1 + step % 2: 1}) for step in range(1, 121))
    assert warnings_of(run_of(tmp_path, reports, 10)) == {}


@pytest.mark.parametrize(("strategy", "warned"), [("grid", True), ("bucketed", True), ("shuffled", False)])
def test_one_micro_batch_of_like_lengths_is_one_sided(tmp_path: Path, strategy: str, warned: bool) -> None:
    reports = (step_of(step, {step % 4: 1}) for step in range(1, 121))
    found = warnings_of(run_of(tmp_path, reports, 10, strategy=strategy))
    assert ("one-sided-steps" in found) == warned
    if warned:
        assert found["one-sided-steps"].startswith("Each step is one micro-batch and so of one length bucket")


def test_batches_of_mixed_lengths_are_not_one_sided(tmp_path: Path) -> None:
    reports = (step_of(step, {3: 4} if step % 3 else {2: 1, 3: 3}) for step in range(1, 121))
    assert warnings_of(run_of(tmp_path, reports, 1, strategy="shuffled")) == {}


def test_jitter_says_that_lines_are_compared(tmp_path: Path) -> None:
    run_dir = simulate(tmp_path, "bucketed", "shuffled", epochs=8, length_effect=0.8, accumulate=2, every_steps=4)
    text = warnings_of(run_dir)["loss-jitter"]
    assert "of the variance of the loss of a line of 4 steps comes from which lengths a line holds" in text


def test_lines_end_with_the_epoch_so_that_coverage_is_whole(tmp_path: Path) -> None:
    reports = [step_of(step, {0: 1, 1: 1}, epoch=(step - 1) // 14, window=(step - 1) % 14) for step in range(1, 57)]
    observed(tmp_path, reports, header={"samples_per_epoch": 56}, every_steps=10, diagnose_every_steps=0)
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl")[0] if isinstance(line, StepLine)]
    assert [line.step for line in lines] == [10, 14, 20, 28, 30, 40, 42, 50, 56]
    assert [line.values["progress/epoch_coverage"] for line in lines if line.step % 14 == 0] == [1.0] * 4
    assert "coverage" not in warnings_of(tmp_path)


def test_an_epoch_with_samples_left_out_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    reports = (report_of(s, random_samples(rng, 3), epoch=(s - 1) // 30) for s in range(1, 61))
    run_dir = observed(tmp_path, (replace(report, loss=Ratio(3.0, 1.0)) for report in reports))
    path = run_dir / "metrics.jsonl"
    assert "coverage" not in warnings_of(run_dir)
    # 90 samples were trained of 12 announced; announce 100.
    path.write_text(path.read_text().replace('"progress/epoch_coverage":7.5', '"progress/epoch_coverage":0.9'))
    assert "An epoch ended with 90 % of its samples trained" in warnings_of(run_dir)["coverage"]


@pytest.mark.parametrize(("train", "warned"), [({"epochs": 1}, True), ({"epochs": 9, "max_steps": 60}, False)])
def test_the_last_epoch_is_judged_where_it_is_whole(tmp_path: Path, train: dict[str, int], warned: bool) -> None:
    run_dir = observed(tmp_path, plain_reports(), header={"samples_per_epoch": 1200}, settings={"train": train})
    assert read_history(run_dir).series("progress/epoch_coverage")[-1] == pytest.approx(0.6)
    assert ("coverage" in warnings_of(run_dir)) == warned
