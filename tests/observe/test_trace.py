from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from observed_runs import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.observe.metrics_file import EventLine, read_lines
from paceline.observe.observer import open_observer
from paceline.observe.trace import TraceFile

SAMPLES = random_samples(np.random.default_rng(0))


def test_a_run_leaves_a_trace_of_its_steps_and_stages(tmp_path):
    observer = open_observer(ObserveConfig(console="quiet", trace=True), tmp_path, total_steps=3, header={})
    for step in range(1, 4):
        observer.step(report_of(step, SAMPLES, seconds=2.0))
    observer.span("target 0 (cpu)", "forward", "batch 7", 100.0, 100.5, samples=[1, 2])
    observer.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == set(processes) and set(processes.values()) == {"trainer", "target 0 (cpu)"}
    steps = [e for e in spans if names[e["pid"], e["tid"]] == "steps"]
    assert [e["name"] for e in steps] == ["step 1", "step 2", "step 3"]
    assert all(abs(e["dur"] - 2e6) < 1 for e in steps)
    assert all(e["args"]["seconds"]["target/busy"] == 1.6 for e in steps)
    (mine,) = [e for e in spans if e["name"] == "batch 7"]
    assert (mine["ts"], mine["dur"], mine["args"]) == (100e6, 0.5e6, {"samples": [1, 2]})


def test_a_trace_that_was_cut_off_lacks_only_its_bracket(tmp_path):
    trace = TraceFile(tmp_path / "trace.json")
    for number in range(3):
        trace.span("a", "b", f"span {number}", number, number + 1)
        trace.counter("a", "queue", number, items=number)
    text = (tmp_path / "trace.json").read_text()
    assert len(json.loads(text + "]")) == 2 + 1 + 6
    trace.close()
    assert len(json.loads((tmp_path / "trace.json").read_text())) == 9


def test_an_empty_trace_is_valid(tmp_path):
    TraceFile(tmp_path / "trace.json").close()
    assert json.loads((tmp_path / "trace.json").read_text()) == []


def test_a_trace_that_cannot_be_written_any_more_costs_a_warning(tmp_path):
    observer = open_observer(ObserveConfig(console="quiet", trace=True), tmp_path, total_steps=3, header={})
    observer.step(report_of(1, SAMPLES))
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), observer._trace._descriptor)
    for step in (2, 3):
        observer.step(report_of(step, SAMPLES))
    observer.close()
    lines = read_lines(tmp_path / "metrics.jsonl")[0]
    warnings = [line.fields["text"] for line in lines if isinstance(line, EventLine) and line.event == "warning"]
    assert len(warnings) == 1 and "the trace is dropped" in warnings[0] and "No space left" in warnings[0]
