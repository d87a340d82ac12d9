"""Tags, coverage, named spikes, and answers with their drafts marked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from observe.step_reports import random_samples, report_of
from paceline.config import ObserveConfig, Settings, dump_settings
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.diagnosis.loss_variance import explain_jitter
from paceline.observe.observer import open_observer
from paceline.observe.run_history import read_history
from paceline.report.decoding import _marked
from paceline.report.report import write_report
from paceline.types import Ratio, StepReport, TagTotals


def steps(count: int, rng: np.random.Generator) -> list[StepReport]:
    reports = (report_of(step, [replace(s, loss=3.0) for s in random_samples(rng)]) for step in range(1, count + 1))
    return [replace(report, gradient_norm=float(rng.lognormal(-0.7, 0.1))) for report in reports]


def written(run_dir: Path, reports: list[StepReport], **settings: object) -> dict[str, str]:
    total = len(reports)
    observer = open_observer(ObserveConfig(console="quiet", **settings), run_dir, total_steps=total, header={})
    (run_dir / "settings.yaml").write_text(
        dump_settings(Settings(run_dir=str(run_dir), target={"path": "t"}, train={"epochs": 2}))
    )
    for report in reports:
        observer.step(report)
    observer.close()
    return {finding.key: finding.sentence for finding in diagnose(read_history(run_dir)) if finding.level == "warning"}


def tagged(report: StepReport, shares: dict[str, float], losses: dict[str, float], samples: int = 6) -> StepReport:
    """The report with its weight split over tags, each with a loss of its own."""
    whole = report.loss.denominator
    tags = {tag: TagTotals(Ratio(losses[tag] * share * whole, share * whole), samples) for tag, share in shares.items()}
    total = sum(totals.loss.numerator for totals in tags.values())
    return replace(report, tags=tags, loss=Ratio(total, whole))


def test_a_tag_that_moves_the_loss_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    reports = [
        tagged(report, {"code": share, "prose": 1 - share}, {"code": 1.0, "prose": 3.0})
        for report, share in zip(steps(80, rng), rng.uniform(0.1, 0.9, 80), strict=True)
    ]
    sentence = written(tmp_path, reports)["loss-jitter"]
    assert "comes from which tags a step holds, chiefly the share of tag " in sentence
    assert "spans more kinds of samples" in sentence
    found = explain_jitter(read_history(tmp_path))
    assert found is not None and found.explained > 0.99 and abs(found.slope) == pytest.approx(2.0, rel=1e-3)


def test_a_starved_tag_is_named_and_a_light_one_is_not(tmp_path: Path) -> None:
    losses = {"tiny": 3.0, "light": 3.0, "rest": 3.0}
    shares = {"tiny": 0.01, "light": 0.2, "rest": 0.79}
    reports = [tagged(report, shares, losses, samples=4) for report in steps(40, np.random.default_rng(0))]
    sentence = written(tmp_path, reports)["starved-tags"]
    assert "tiny (33 % of the samples, 1.0 % of the loss weight)" in sentence.replace("\u00a0", " ")
    assert "light" not in sentence and "rest" not in sentence


@pytest.mark.parametrize(("share", "warned"), [(0.2, True), (0.3, False)])
def test_coverage_of_supervised_tokens_counts_all_epochs(tmp_path: Path, share: float, warned: bool) -> None:
    reports = [
        replace(report, epoch=report.step // 21, ratios={**report.ratios, "coverage/supervised": Ratio(share, 1.0)})
        for report in steps(40, np.random.default_rng(0))
    ]
    assert ("supervised-coverage" in written(tmp_path, reports)) == warned


def test_a_spike_is_named_with_its_samples_now_and_later(tmp_path: Path) -> None:
    reports = steps(60, np.random.default_rng(0))
    rows = {7: np.array([310, 311, 512]), 8: np.array([40])}
    losses = {7: np.array([[3.0, 1.0], [0.0, 0.0], [18.0, 2.0]]), 8: np.array([[4.0, 1.0]])}
    reports[44] = replace(reports[44], gradient_norm=90.0, batches=[7, 8], rows=rows, sample_losses=losses)
    sentence = written(tmp_path, reports, every_steps=2, diagnose_every_steps=50)["gradient-spikes"]
    assert "step 45 (epoch 0, window 44" in sentence
    assert "highest loss: sample 512 with 9.00, sample 40 with 4.00, sample 310 with 3.00" in sentence
    assert "samples 40, 310–311, 512" in sentence
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line.get("event") == "gradient-spike"]
    assert event["step"] == 45 and event["fields"]["batches"] == [7, 8] and event["fields"]["norm"] == 90.0
    assert any("sample 512" in line["fields"].get("text", "") for line in lines if line.get("event") == "warning")


def test_answers_show_which_tokens_were_drafted() -> None:
    pieces = ["A", " b", " <c>", " d", " e", " f", " g"]
    assert _marked(pieces, [2, 0, 1]) == (
        "<b>A</b><u> b &lt;c&gt;</u><b> d</b><i>│</i><b> e</b><i>│</i><u> f</u><b> g</b><i>│</i>"
    )
    # The limit cut the last pass: what is not there is not marked.
    assert _marked(pieces[:3], [3]) == "<b>A</b><u> b &lt;c&gt;</u>"
    assert _marked([], []) == ""


def test_the_report_holds_the_answers(tmp_path: Path) -> None:
    written(tmp_path, steps(5, np.random.default_rng(0)))
    rows = [{"id": "p1", "tau": 2.0, "accepted": [1], "pieces": ["One", " two", " three"]}]
    (tmp_path / "evaluation.json").write_text(
        json.dumps({"evaluations": [{"step": 5, "tau_micro": 2.0, "rows": rows}]})
    )
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<b>One</b><u> two</u><b> three</b><i>│</i>" in page and "Underlined" in page
