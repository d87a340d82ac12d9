"""What plan and store add to a step report, recounted by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.cli.train import ready_store
from paceline.config import load_settings
from paceline.drafter.spec import DrafterSpec
from paceline.run.build import build_run, resolve_models
from paceline.run.flops import drafter_flops
from paceline.run.step_metrics import MAX_TAGS, StepMetrics, tag_table
from paceline.run.training_plan import epoch_plan
from paceline.target_model.layer_costs import layer_costs
from paceline.types import Ratio, StepReport, StepTimes, WorkerTotals


def report_of(batches: list[int], losses: dict[int, np.ndarray]) -> StepReport:
    whole = sum(np.asarray(values).sum(0) for values in losses.values())
    return StepReport(
        step=1, epoch=0, window=0, loss=Ratio(*map(float, whole)), ratios={"accuracy/all": Ratio(3.0, 70.0)},
        buckets={}, batches=batches, gradient_norm=1.0, clipped=False, skipped=False, learning_rate=1.0, anchors=0,
        samples=0, real_tokens=0, padded_tokens=0, draft_positions=0, seconds=2.0, sample_losses=losses,
    )  # fmt: skip


def test_tags_rows_coverage_and_use_of_the_peak(make_run: Callable[..., Path], few_chats: Path, tmp_path: Path) -> None:
    lines = few_chats.read_text().splitlines()
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:30]))
    (tmp_path / "b.jsonl").write_text("\n".join(lines[30:]))
    peak = {"cpu": 2.0}
    data = {"train": [f"{tmp_path}/a.jsonl#tag=mine", f"{tmp_path}/b.jsonl"], "store": str(tmp_path / "own")}
    settings = load_settings(make_run(data=data, observe={"peak_tflops": peak, "console": "quiet"}))
    models = resolve_models(settings)
    ready_store(settings, models.facts)
    run = build_run(settings, models)
    indices = [index for planned in run.steps[:5] for index in planned.batches]
    plan = epoch_plan(settings, run.spec, run.source, 0)
    rows = {index: plan.batch(index).rows for index in indices}
    rng = np.random.default_rng(0)
    losses = {index: rng.random((len(rows[index]), 2)) for index in reversed(indices)}
    times = StepTimes({"target/busy": 1.5}, {"target_0": WorkerTotals(9, 700, 1.5)})
    found = StepMetrics(run)(report_of(indices, losses), times)
    assert (found.waits_s, found.workers) == (times.waits_s, times.workers)
    assert {index: list(values) for index, values in found.rows.items()} == {i: list(r) for i, r in rows.items()}
    assert set(found.tags) >= {"mine", "source:a.jsonl", "source:b.jsonl"} and "script:latin" not in found.tags
    for tag in ("mine", "source:a.jsonl", "source:b.jsonl"):
        totals = found.tags[tag]
        mine = [
            losses[index][place]
            for index in indices
            for place, row in enumerate(rows[index])
            if ("a.jsonl" in run.source.origin(row)) == (tag != "source:b.jsonl")
        ]
        assert totals.samples == len(mine)
        assert [totals.loss.numerator, totals.loss.denominator] == pytest.approx(np.sum(mine, axis=0))
    every = np.concatenate(list(rows.values()))
    masks = [mask for _, mask in run.source.read(every)]
    assert found.ratios["coverage/supervised"] == Ratio(70.0, float(sum(mask.sum() for mask in masks)))
    lengths = run.source.lengths[every]
    done = sum(layer.flops(lengths) for layer in layer_costs(run.settings.target)[: max(run.taps) + 1])
    assert found.ratios["speed/mfu_target"] == Ratio(pytest.approx(done), 2.0 * 2e12)
    assert found.ratios["speed/mfu_drafter"].denominator == 2.0 * 2e12


def test_a_tag_that_every_sample_has_tells_nothing() -> None:
    tags, _, _ = tag_table([["all", "x.jsonl"]] * 3)
    assert tags == []
    tags, codes, members = tag_table([["all", "odd tag", "d/x.jsonl"], ["all", "d/x.jsonl"], ["all", "d/y.jsonl"]])
    assert tags == ["source:x.jsonl", "odd_tag", "source:y.jsonl"] and codes.tolist() == [0, 1, 2]
    assert members.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_rare_tags_are_put_together() -> None:
    names = [[f"tag{number}", "x"] for number in range(50) for _ in range(100 - number)]
    tags, codes, members = tag_table(names)
    assert len(tags) == MAX_TAGS and tags[-1] == "other" and tags[0] == "tag0"
    counts = np.bincount(codes, minlength=len(members)) @ members
    assert counts[0] == 100 and counts[-1] == sum(100 - number for number in range(MAX_TAGS - 1, 50))


def test_a_tag_named_other_is_kept_apart_from_the_rare_ones() -> None:
    names = [["other", "x"]] * 200 + [["other_", "x"]] * 190
    names += [[f"tag{number}", "x"] for number in range(50) for _ in range(100 - number)]
    tags, codes, members = tag_table(names)
    assert len(tags) == MAX_TAGS == len(set(tags))
    counts = dict(zip(tags, np.bincount(codes, minlength=len(members)) @ members, strict=True))
    assert counts["other"] == 200 and counts["other_"] == 190
    assert counts[tags[-1]] == sum(100 - number for number in range(MAX_TAGS - 3, 50))


def test_flops_term_by_term() -> None:
    """One sample of 100 tokens with 3 anchors; the second layer sees 30 of them at most."""
    spec = DrafterSpec(
        num_layers=2, block_size=4, hidden_size=8, intermediate_size=20, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, layers=("full", "sliding"), causal=(False, True), sliding_window=30, rope_theta=1e4,
        rms_norm_eps=1e-6, vocab_size=50, mask_token_id=1, taps=(1, 4), num_target_layers=9,
    )  # fmt: skip
    layers = 2 * (8 * 16 * 2 + 8 * 8 * 2 + 3 * 8 * 20)
    seen = 50 + 4 + np.mean(np.minimum(np.arange(0, 100, 0.001), 30)) + 4
    slots = 3 * (4 * (6 * layers + 12 * 16 * seen) + 3 * 4 * 8 * 50)
    context = 100 * (4 * (2 * 8 * 8) + 6 * 2 * (2 * 8 * 8))
    assert drafter_flops(spec, np.array([100]), np.array([3])) == pytest.approx(slots + context, rel=1e-5)


def test_a_run_leaves_tags_depths_memory_spans_and_a_profile(make_run: Callable[..., Path]) -> None:
    """The pipeline's whole record: the trace is checked against the event format, field by field."""
    from paceline.cli import main

    observe = {"console": "quiet", "trace": True, "profile_steps": [2, 3], "peak_tflops": {"cpu": 0.1}}
    settings = make_run(flow={"mode": "pipeline"}, train={"max_steps": 6}, observe=observe)
    assert main(["train", str(settings)]) == 0
    run_dir = Path(load_settings(settings).run_dir)
    events = json.loads((run_dir / "trace.json").read_text())
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(processes.values()) >= {"trainer", "feed", "target 0 (cpu)", "drafter 0 (cpu)", "checkpoint", "queues"}
    for event in events:
        assert event["ph"] in "XMC" and isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["pid"] in processes
        if event["ph"] == "X":
            assert event["ts"] > 1e15 and event["dur"] >= 0 and (event["pid"], event["tid"]) in threads
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    spans = [e for e in events if e["ph"] == "X" and processes[e["pid"]] == "drafter 0 (cpu)"]
    assert sum(e["name"].startswith("optimizer step") for e in spans) == 6
    profile = json.loads((run_dir / "profile.json").read_text())
    assert any("linear" in str(event.get("name", "")) for event in profile["traceEvents"])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    notes = [line["fields"]["text"] for line in lines if line.get("event") == "note"]
    assert any("profile.json" in note for note in notes)
    values = [line["values"] for line in lines if line["kind"] == "step"]
    expected = {"queue/features_bytes", "queue/host_batches_items", "memory_peak/target_0_bytes", "stage/feed/busy"}
    assert expected | {"coverage/supervised", "speed/mfu_target", "speed/mfu_drafter"} <= values[-1].keys()
    assert 0 < values[-1]["speed/mfu_drafter"] < 1
