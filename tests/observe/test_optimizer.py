"""Gradient spikes, skipped steps, clipping, weights that do not move."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from observed_runs import observed, plain_reports, warnings_of
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.diagnosis.optimizer import ranges, spikes_of
from paceline.observe.run_history import read_history
from paceline.types import Ratio


def test_frozen_norms_are_named_after_enough_steps(tmp_path: Path) -> None:
    ratios = {"norms/unmoved": Ratio(78, 100)}
    short, long = (
        observed(tmp_path / str(count), plain_reports(count, ratios=lambda step: ratios)) for count in (60, 220)
    )
    assert "frozen-norms" not in warnings_of(short)
    assert warnings_of(long)["frozen-norms"].startswith(
        "78 % of the norm weights still have their first value after 220 steps"
    )


def test_clipping_of_every_step_is_not_a_warning(tmp_path: Path) -> None:
    found = diagnose(read_history(observed(tmp_path, plain_reports(clipped=lambda step: True))))
    assert [(finding.key, finding.level) for finding in found if finding.key == "clipping"] == [("clipping", "info")]


def test_a_spike_is_named_with_its_samples_now_and_later(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    reports = [replace(report, gradient_norm=float(rng.lognormal(-0.7, 0.1))) for report in plain_reports()]
    rows = {7: np.array([310, 311, 512]), 8: np.array([40])}
    losses = {7: np.array([[3.0, 1.0], [0.0, 0.0], [18.0, 2.0]]), 8: np.array([[4.0, 1.0]])}
    reports[44] = replace(reports[44], gradient_norm=90.0, batches=[7, 8], rows=rows, sample_losses=losses)
    sentence = warnings_of(observed(tmp_path, reports, every_steps=2, diagnose_every_steps=50))["gradient-spikes"]
    assert "step 45 (epoch 0, window 44" in sentence
    assert "highest loss: sample 512 with 9.00, sample 40 with 4.00, sample 310 with 3.00" in sentence
    assert "samples 40, 310–311, 512" in sentence
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line.get("event") == "gradient-spike"]
    assert event["step"] == 45 and event["fields"]["batches"] == [7, 8] and event["fields"]["norm"] == 90.0
    assert any("sample 512" in line["fields"].get("text", "") for line in lines if line.get("event") == "warning")


def test_a_falling_gradient_norm_has_few_spikes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    norms = (0.4 + 10 * np.exp(-np.arange(600) / 60)) * np.exp(0.15 * rng.normal(size=600))
    assert spikes_of(norms)[0].size == 0
    norms[80] *= 6  # a spike on the slope
    norms[400] *= 6  # and one far below that slope
    reports = plain_reports(600, gradient_norm=lambda step: float(norms[step - 1]))
    sentence = warnings_of(observed(tmp_path, reports, diagnose_every_steps=0))["gradient-spikes"]
    assert sentence.startswith("2 gradient spikes: step ") and "step 81 (" in sentence and "step 401 (" in sentence


def test_ranges_are_short() -> None:
    assert ranges([9, 3, 5, 4]) == "3–5, 9" and ranges([]) == ""
