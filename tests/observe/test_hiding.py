"""What a step saw cannot be hidden: not by wide or narrow buckets, by long lines, or by a run that is far from its end.

The other way about, healthy runs are left alone.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from observe.simulated_runs import simulate
from observe.step_reports import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.diagnosis.gradient_spikes import spikes_of
from paceline.observe.metrics_file import EventLine, read_lines
from paceline.observe.observer import open_observer
from paceline.observe.run_history import read_history
from paceline.types import Ratio, StepReport


def warnings_of(run_dir: Path) -> dict[str, str]:
    return {finding.key: finding.sentence for finding in diagnose(read_history(run_dir)) if finding.level == "warning"}


def written(run_dir: Path, reports: list[StepReport], **settings: object) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "settings.yaml").write_text(yaml.safe_dump(settings))
    observer = open_observer(
        ObserveConfig(console="quiet", diagnose_every_steps=0), run_dir, total_steps=len(reports), header={}
    )
    for report in reports:
        observer.step(report)
    observer.close()
    return run_dir


def plain(count: int) -> list[StepReport]:
    rng = np.random.default_rng(0)
    return [report_of(step, [replace(s, loss=3.0) for s in random_samples(rng)]) for step in range(1, count + 1)]


@pytest.mark.parametrize(
    ("plan", "accumulate"),
    [
        ({"edges": [4096]}, 1),
        ({"num_buckets": 1}, 1),
        ({"num_buckets": 256, "width_multiple": 1}, 2),
    ],
)
def test_long_lines_and_odd_buckets_do_not_hide_steps_of_one_length(
    tmp_path: Path, plan: dict[str, object], accumulate: int
) -> None:
    run_dir = simulate(tmp_path, "sorted", "shuffled", accumulate=accumulate, plan=plan, every_steps=50)
    assert "steps do not hold the same lengths" in warnings_of(run_dir)["one-sided-steps"]


@pytest.mark.parametrize("plan", [{"edges": [24, 4096]}, {"num_buckets": 256, "width_multiple": 1}])
def test_buckets_that_tell_nothing_do_not_hide_why_the_loss_jumps(tmp_path: Path, plan: dict[str, object]) -> None:
    run_dir = simulate(tmp_path, "sorted", "shuffled", accumulate=4, epochs=2, plan=plan)
    sentence = warnings_of(run_dir)["loss-jitter"]
    assert "which lengths a step holds: the loss moves by −0.2" in sentence and "as their mean doubles" in sentence


def test_a_run_far_from_its_end_is_told_why_the_loss_jumps(tmp_path: Path) -> None:
    run_dir = simulate(tmp_path, "bucketed", "shuffled", accumulate=1)
    path = run_dir / "metrics.jsonl"
    first, rest = path.read_text().split("\n", 1)
    planned = read_history(run_dir).total_steps
    assert planned > 600
    path.write_text(first.replace(f'"total_steps":{planned}', '"total_steps":1000000') + "\n" + rest)
    assert read_history(run_dir).total_steps == 1_000_000
    assert "loss-jitter" in warnings_of(run_dir)


@pytest.mark.parametrize(
    ("strategy", "plan", "accumulate"),
    [
        ("mixed", {"mixed_span": 6}, 4),
        ("packed", {}, 4),
        ("shuffled", {}, 4),
        ("grid", {"edges": [64, 4096]}, 4),
        ("grid", {"num_buckets": 1}, 4),
    ],
)
def test_steps_that_hold_all_lengths_are_not_called_one_sided(
    tmp_path: Path, strategy: str, plan: dict[str, object], accumulate: int
) -> None:
    run_dir = simulate(tmp_path, strategy, "stratified", accumulate=accumulate, epochs=3, plan=plan)
    assert "one-sided-steps" not in warnings_of(run_dir)


@pytest.mark.parametrize("seed", [19, 21, 29])
def test_a_level_plan_of_few_micro_batches_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    lengths = np.random.default_rng(seed).lognormal(5.3, 0.8, 6000).astype(np.int64).clip(16, 4096)
    monkeypatch.setattr("observe.simulated_runs.skewed_lengths", lambda: lengths)
    assert warnings_of(simulate(tmp_path, "grid", "stratified", accumulate=4, epochs=4)) == {}


def test_a_curriculum_is_not_told_to_be_what_it_was_chosen_not_to_be(tmp_path: Path) -> None:
    plan = {"curriculum_share": 1.0, "curriculum_stages": 200}
    run_dir = simulate(tmp_path, "grid", "curriculum", accumulate=2, plan=plan)
    found = {finding.key: finding for finding in diagnose(read_history(run_dir))}
    assert found["one-sided-steps"].level == "info"
    assert "curriculum asks for it" in found["one-sided-steps"].advice
    assert "by intent" in found["loss-jitter"].advice


def test_one_micro_batch_a_step_is_not_told_to_be_stratified(tmp_path: Path) -> None:
    sentence = warnings_of(simulate(tmp_path, "bucketed", "shuffled", accumulate=1))["loss-jitter"]
    assert sentence.endswith("Raise plan.accumulate, so that a window spans more lengths.")


def test_a_gradient_norm_that_falls_has_no_spikes_but_those_that_stand_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    norms = (0.4 + 10 * np.exp(-np.arange(600) / 60)) * np.exp(0.15 * rng.normal(size=600))
    assert spikes_of(norms)[0].size == 0
    norms[80] *= 6  # a spike on the slope
    norms[400] *= 6  # and one far below that slope
    reports = [replace(report, gradient_norm=float(norm)) for report, norm in zip(plain(600), norms, strict=True)]
    sentence = warnings_of(written(tmp_path, reports))["gradient-spikes"]
    assert sentence.startswith("2 gradient spikes: step ") and "step 81 (" in sentence and "step 401 (" in sentence


def test_a_tree_is_compared_with_the_chain_of_the_same_steps(tmp_path: Path) -> None:
    """Trees are measured now and then, here on a step whose chain is shorter than usual."""
    reports = [
        replace(
            report,
            ratios={"acceptance/streak": Ratio(30 if report.step % 50 else 15, 10)}
            | ({} if report.step % 50 else {"tree/streak_16": Ratio(18, 10)}),
        )
        for report in plain(100)
    ]
    assert "tree-16" not in warnings_of(written(tmp_path, reports))


def test_a_tree_with_fewer_nodes_than_a_block_has_drafts_may_accept_less(tmp_path: Path) -> None:
    slots = {f"accuracy/slot_{slot}": Ratio(95 - slot, 100) for slot in range(1, 32)}
    ratios = slots | {"acceptance/streak": Ratio(200, 10), "tree/streak_16": Ratio(150, 10)}
    assert "tree-16" not in warnings_of(written(tmp_path, [replace(r, ratios=ratios) for r in plain(40)]))


def test_decoding_below_training_is_not_blamed_on_forwards_that_agree(tmp_path: Path) -> None:
    run_dir = written(tmp_path, [replace(r, ratios={"acceptance/streak": Ratio(20, 10)}) for r in plain(60)])
    entry = {"step": 60, "tau_micro": 1.5, "training_tau": 1.5, "training_agrees": True}
    (run_dir / "evaluation.json").write_text(json.dumps({"evaluations": [entry]}))
    sentence = warnings_of(run_dir)["decoded-below-training"]
    assert "The forward passes agree, so the data differ" in sentence and "template" not in sentence


def test_slots_that_are_right_by_heart_may_be_flat(tmp_path: Path) -> None:
    slots = {f"accuracy/slot_{slot}": Ratio(990 - slot, 1000) for slot in range(1, 8)}
    sentence = warnings_of(written(tmp_path, [replace(r, ratios=slots) for r in plain(60)]))["flat-slots"]
    assert "Where the run has learnt its few samples by heart that is no wonder" in sentence


@pytest.mark.parametrize(("train", "warned"), [({"epochs": 1}, True), ({"epochs": 9, "max_steps": 60}, False)])
def test_the_last_epoch_is_judged_where_it_is_whole(tmp_path: Path, train: dict[str, int], warned: bool) -> None:
    run_dir = tmp_path / "run"
    written(run_dir, plain(60), train=train)
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace('"progress/epoch_samples":720.0', '"progress/epoch_coverage":0.6'))
    assert '"progress/epoch_coverage":0.6' in path.read_text()
    assert ("coverage" in warnings_of(run_dir)) == warned


def test_a_short_run_is_looked_at_before_it_ends(tmp_path: Path) -> None:
    """And a long one once more, for what came after the last look."""
    observer = open_observer(ObserveConfig(console="quiet"), tmp_path, total_steps=60, header={})
    for report in plain(60):
        observer.step(replace(report, skipped=report.step == 50))
    observer.close()
    lines = read_lines(tmp_path / "metrics.jsonl")[0]
    told = [line.fields["text"] for line in lines if isinstance(line, EventLine) and line.event == "warning"]
    assert any("1 step was skipped" in text for text in told)
