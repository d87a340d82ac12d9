"""A run read back: numbers pooled as the catalogue says, missing and cut files noted."""

from __future__ import annotations

import numpy as np
import pytest

from observed_runs import make_run_directory
from paceline.observe.metrics_file import read_lines
from paceline.observe.run_history import read_history


@pytest.fixture
def make_run(tmp_path):
    return lambda **kind: make_run_directory(tmp_path / "run", **kind)


def test_pooled_values_equal_a_recount(make_run):
    run_dir = make_run(steps=30)
    history = read_history(run_dir)
    lines = [line for line in read_lines(run_dir / "metrics.jsonl")[0] if line.__class__.__name__ == "StepLine"]
    for bucket in range(4):
        name = f"loss/bucket_{bucket}"
        pairs = [(line.values[name], line.weights[name]) for line in lines if name in line.values]
        expected = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
        assert history.pooled(name) == pytest.approx(expected)
    assert history.pooled("window/samples") == 40
    assert np.isnan(history.pooled("tree/tau_16"))


@pytest.mark.parametrize("content", ["", "[1, 2]", "{", "\x00", "a: [", "text"])
@pytest.mark.parametrize("name", ["settings.yaml", "run.json", "evaluation.json"])
def test_a_damaged_file_costs_its_own_content_only(make_run, name, content):
    run_dir = make_run(steps=2)
    (run_dir / name).write_text(content)
    run = read_history(run_dir)
    assert [note.split()[0] for note in run.notes if not note.startswith("evaluation.json is missing")] == [name]
    assert run.steps.tolist() == [1, 2]


@pytest.mark.parametrize("share", [0.02, 0.5, 0.83])
def test_metrics_cut_in_the_middle_of_a_line_are_read(make_run, share):
    run_dir = make_run(steps=12)
    path = run_dir / "metrics.jsonl"
    raw = path.read_bytes()
    cut = raw[: max(int(len(raw) * share), 200)]
    path.write_bytes(cut)
    run = read_history(run_dir)
    assert run.status == "not closed" and any("the last line is half written" in note for note in run.notes)
    assert run.steps.tolist() == list(range(1, cut.count(b"\n")))  # one whole line is the header
