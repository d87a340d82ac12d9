"""What plan and store add to a step report, recounted by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.cli.train import ready_store
from paceline.config import load_settings
from paceline.drafter.spec import DrafterSpec
from paceline.run.build import build_run, resolve_models
from paceline.run.flops import drafter_flops, target_flops
from paceline.run.step_metrics import MAX_TAGS, StepMetrics, tag_table
from paceline.run.training_plan import epoch_plan
from paceline.types import Ratio, StepReport, StepTimes, TargetFacts, WorkerTotals


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
    done = target_flops(run.facts, max(run.taps) + 1, lengths)
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
    """One sample of 100 tokens with 3 anchors."""
    facts = TargetFacts(
        path="", architecture="LlamaForCausalLM", model_type="llama", num_layers=9, hidden_size=8, vocab_size=50,
        intermediate_size=20, num_attention_heads=4, num_key_value_heads=2, head_dim=4, rms_norm_eps=None,
        rope_theta=None, max_position_embeddings=None, initializer_range=None, tied_head=False, bos_token_id=None,
        eos_token_ids=(), pad_token_id=None, fingerprint="",
    )  # fmt: skip
    linear = 5 * (8 * 16 * 2 + 8 * 8 * 2 + 3 * 8 * 20)
    assert target_flops(facts, 5, np.array([100])) == 100 * (2 * linear + 4 * 5 * 16 * 50)
    assert target_flops(replace(facts, architecture="Qwen3MoeForCausalLM"), 5, np.array([100])) is None
    assert target_flops(replace(facts, head_dim=None), 5, np.array([100])) is None
    spec = DrafterSpec(
        num_layers=2, block_size=4, hidden_size=8, intermediate_size=20, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, layers=("full", "full"), causal=(False, False), sliding_window=None, rope_theta=1e4,
        rms_norm_eps=1e-6, vocab_size=50, mask_token_id=1, taps=(1, 4), num_target_layers=9,
    )  # fmt: skip
    layers = 2 * (8 * 16 * 2 + 8 * 8 * 2 + 3 * 8 * 20)
    slots = 3 * 4 * (6 * layers + 4 * 8 * 50 + 3.5 * 2 * 4 * 16 * (50 + 4))
    context = 100 * (4 * (2 * 8 * 8) + 6 * 2 * (2 * 8 * 8))
    assert drafter_flops(spec, np.array([100]), np.array([3])) == slots + context


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
