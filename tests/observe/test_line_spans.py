"""Lines over many optimizer steps: what is said of steps is counted by step, whatever `observe.every_steps` is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from observe.simulated_runs import simulate
from observe.step_reports import Sample, report_of
from paceline.config import ObserveConfig, Settings, dump_settings
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.metrics_file import StepLine, read_lines
from paceline.observe.observer import open_observer
from paceline.observe.run_history import read_history
from paceline.report.report import write_report
from paceline.types import BucketTotals, StepReport


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


def lopsided(steps: int) -> Iterator[StepReport]:
    """Each step draws three of four micro-batches from one bucket, and all buckets take turns."""
    for step in range(1, steps + 1):
        yield step_of(step, {step % 4: 3, (step + 1) % 4: 1})


def level(steps: int) -> Iterator[StepReport]:
    """Each step holds all four buckets."""
    for step in range(1, steps + 1):
        yield step_of(step, {0: 1, 1: 1, 2: 1, 3: 1})


def run_of(run_dir: Path, reports: Iterator[StepReport], every: int, total: int = 120, **plan: object) -> Path:
    settings = ObserveConfig(console="quiet", every_steps=every, diagnose_every_steps=40)
    observer = open_observer(settings, run_dir, total_steps=total, header={})
    (run_dir / "settings.yaml").write_text(
        dump_settings(Settings(run_dir=str(run_dir), target={"path": "t"}, plan=plan))
    )
    for report in reports:
        observer.step(report)
    observer.close()
    return run_dir


def warnings_of(run_dir: Path) -> dict[str, str]:
    return {finding.key: finding.text for finding in diagnose(read_history(run_dir)) if finding.level == "warning"}


@pytest.mark.parametrize("every", [1, 2, 10, 60])
def test_one_sided_steps_are_named_however_many_steps_a_line_has(tmp_path: Path, every: int) -> None:
    run_dir = run_of(tmp_path / "bad", one_sided(120), every)
    text = warnings_of(run_dir)["one-sided-steps"]
    assert text.startswith("50 % of the steps saw samples of one length bucket only, most often bucket 3")
    told = [line for line in read_lines(run_dir / "metrics.jsonl")[0] if getattr(line, "event", "") == "warning"]
    assert any("one length bucket only" in line.fields["text"] for line in told)
    assert warnings_of(run_of(tmp_path / "good", level(120), every)) == {}


@pytest.mark.parametrize("every", [1, 10])
def test_steps_that_draw_three_of_four_from_one_bucket_are_named(tmp_path: Path, every: int) -> None:
    text = warnings_of(run_of(tmp_path, lopsided(120), every))["one-sided-steps"]
    assert text.startswith("100 % of the steps drew at least three of four micro-batches from one length bucket")
    assert "2.0 of 4 buckets" in text


def test_a_bucket_that_is_most_of_the_data_may_be_most_of_a_step(tmp_path: Path) -> None:
    reports = (step_of(step, {0: 3, 1 + step % 2: 1}) for step in range(1, 121))
    assert warnings_of(run_of(tmp_path, reports, 10)) == {}


@pytest.mark.parametrize(("strategy", "warned"), [("grid", True), ("bucketed", True), ("shuffled", False)])
def test_a_step_of_one_micro_batch_is_one_sided_where_batches_hold_like_lengths(
    tmp_path: Path, strategy: str, warned: bool
) -> None:
    reports = (step_of(step, {step % 4: 1}) for step in range(1, 121))
    found = warnings_of(run_of(tmp_path, reports, 10, strategy=strategy))
    assert ("one-sided-steps" in found) == warned
    if warned:
        assert found["one-sided-steps"].startswith("Each step is one micro-batch and so of one length bucket")


def test_batches_of_mixed_lengths_are_not_called_one_sided(tmp_path: Path) -> None:
    reports = (step_of(step, {3: 4} if step % 3 else {2: 1, 3: 3}) for step in range(1, 121))
    assert warnings_of(run_of(tmp_path, reports, 1, strategy="shuffled")) == {}


@pytest.mark.parametrize("every", [1, 8, 50])
def test_the_column_in_steps_counts_steps_and_not_lines(tmp_path: Path, every: int) -> None:
    page = write_report(run_of(tmp_path, one_sided(100), every, total=100)).read_text(encoding="utf-8")
    head, *rows = re.findall(r"<tr>(.*?)</tr>", page[page.index('id="data"') :], re.DOTALL)[:5]
    column = re.findall(r"<th[^>]*>(.*?)</th>", head).index("in steps")
    for row in rows:
        assert re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)[column] == "50 %", row


def test_captions_say_what_a_line_is(tmp_path: Path) -> None:
    single = write_report(run_of(tmp_path / "a", level(60), 1, total=60)).read_text(encoding="utf-8")
    many = write_report(run_of(tmp_path / "b", level(60), 5, total=60)).read_text(encoding="utf-8")
    assert "Grey: every step;" in single and "each line of 5 steps" not in single
    assert "Grey: each line of 5 steps;" in many and "every step" not in many
    assert "Share of each length bucket in the samples of a step." in single
    assert "mixture inside a line cannot be seen here" in many


def test_the_diagnosis_of_jitter_says_that_lines_are_compared(tmp_path: Path) -> None:
    run_dir = simulate(tmp_path, "bucketed", "shuffled", epochs=8, length_effect=0.8, accumulate=2, every_steps=4)
    text = warnings_of(run_dir)["loss-jitter"]
    assert "of the variance of the loss of a line of 4 steps comes from which lengths a line holds" in text


def test_lines_end_with_the_epoch_so_that_its_coverage_is_whole(tmp_path: Path) -> None:
    reports = [step_of(step, {0: 1, 1: 1}, epoch=(step - 1) // 14, window=(step - 1) % 14) for step in range(1, 57)]
    settings = ObserveConfig(console="quiet", every_steps=10, diagnose_every_steps=0)
    observer = open_observer(settings, tmp_path, total_steps=56, header={"samples_per_epoch": 56})
    for report in reports:
        observer.step(report)
    observer.close()
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl")[0] if isinstance(line, StepLine)]
    assert [line.step for line in lines] == [10, 14, 20, 28, 30, 40, 42, 50, 56]
    assert [line.values["progress/epoch_coverage"] for line in lines if line.step % 14 == 0] == [1.0] * 4
    assert "coverage" not in warnings_of(tmp_path)
