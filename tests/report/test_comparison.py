from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from observed_runs import simulate
from paceline.cli import report as command
from paceline.cli.command import guarded
from paceline.config import Settings, dump_settings
from paceline.observe.diagnosis.mixture import explain_jitter
from paceline.observe.run_history import read_history
from paceline.report.comparison import forked_at, render_comparison, since, write_comparison


def write_settings(run_dir, **plan):
    settings = Settings(run_dir=str(run_dir), target={"path": "small"}, plan=plan)
    (run_dir / "settings.yaml").write_text(dump_settings(settings))


def test_two_runs_side_by_side_show_what_differs_and_by_how_much(tmp_path):
    bad = simulate(tmp_path / "before", "bucketed", "shuffled", epochs=3)
    good = simulate(tmp_path / "after", "grid", "stratified", epochs=3)
    write_settings(bad, strategy="bucketed", schedule="shuffled")
    write_settings(good, strategy="grid", schedule="stratified")
    text = write_comparison([bad, good], tmp_path / "both.html").read_text()
    variances = [explain_jitter(read_history(run_dir)).deviation ** 2 for run_dir in (bad, good)]
    row = re.search(r"its variance, first run = 1</th><td>([\d.]+)</td><td>([\d.]+)</td>", text)
    assert float(row.group(1)) == 1.0
    assert float(row.group(2)) == pytest.approx(variances[1] / variances[0], abs=5e-4)
    assert '<th scope="row">plan.schedule</th><td>shuffled</td><td>stratified</td>' in text
    assert "plan.token_budget" not in text
    assert "before:</b>" in text and "after:</b>" not in text
    ids = re.findall(r'id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)


def test_old_and_half_written_runs_are_compared(make_run):
    first, second = make_run(steps=3, name="a"), make_run(steps=3, name="b")
    path = second / "metrics.jsonl"
    path.write_text(path.read_text().replace('"format":1', '"format":9')[:-40])
    (second / "settings.yaml").unlink()
    text = render_comparison([read_history(first), read_history(second)])
    assert "b: metrics.jsonl has format 9, this version writes 1" in text
    assert "b: settings.yaml is missing" in text
    assert "No warnings in any of the runs." in text


def test_lines_of_many_steps_are_not_set_against_single_steps(tmp_path):
    """Ten steps together scatter less than one, whatever was trained."""
    one = read_history(simulate(tmp_path / "one", "bucketed", "shuffled", accumulate=1, epochs=3))
    ten = read_history(simulate(tmp_path / "ten", "bucketed", "shuffled", accumulate=1, epochs=3, every_steps=10))
    assert explain_jitter(ten).deviation < 0.7 * explain_jitter(one).deviation
    text = render_comparison([one, ten])
    assert "its variance, first run = 1</th><td>1.000</td><td>–</td>" in text


def test_a_first_run_whose_loss_does_not_scatter_is_no_error(tmp_path):
    run = read_history(simulate(tmp_path, "grid", "stratified", accumulate=1, epochs=1))
    still = replace(run, values=run.values | {"loss": np.full(run.steps.size, 2.0)})
    assert explain_jitter(still).deviation == 0
    assert "its variance, first run = 1" not in render_comparison([still, run])  # nothing to compare with


def test_runs_of_the_same_name_are_told_apart(make_run):
    run = read_history(make_run(steps=2))
    text = render_comparison([run, run])
    assert "run (1)" in text and "run (2)" in text


def test_each_tau_has_its_prompts_and_limits_beside_it(make_run):
    runs = []
    for name, tokens, block in (("a", 64, 4), ("b", 256, 8)):
        run_dir = make_run(steps=2, name=name)
        conditions = {"max_new_tokens": tokens, "temperature": 0.0, "dtype": "float32"}
        entry = {"step": 2, "num_prompts": 24, "tau_micro": 2.5, "conditions": conditions}
        (run_dir / "evaluation.json").write_text(json.dumps({"evaluations": [entry]}))
        (run_dir / "run.json").write_text(json.dumps({"versions": {"torch": name}, "drafter": {"block_size": block}}))
        runs.append(read_history(run_dir))
    text = render_comparison(runs)
    cells = "".join(f"<td>24 prompts, ≤ {tokens} tokens, greedy, float32</td>" for tokens in (64, 256))
    assert f'<th scope="row">decoded with</th>{cells}' in text
    drafters, environments = text.index('id="drafters"'), text.index('id="environment"')
    assert "block_size" in text[drafters:environments] and "block_size" not in text[environments:]
    assert "versions.torch" in text[environments:]


def test_the_command_compares_several_runs(make_run, tmp_path, capsys, monkeypatch):
    first, second = make_run(steps=2, name="a"), make_run(steps=2, name="b")
    monkeypatch.chdir(tmp_path)
    assert guarded(command.run, [str(first), str(second)]) == 0
    assert capsys.readouterr().out.strip() == "comparison.html"
    assert (tmp_path / "comparison.html").is_file()
    assert guarded(command.run, [str(first), str(tmp_path / "none")]) == 1
    assert "none: no such folder" in capsys.readouterr().err
    for words in ([], ["--watch"]):
        assert guarded(command.run, words) == 2
        assert "given" in capsys.readouterr().err


def test_forks_are_compared_from_the_fork_on(make_run, tmp_path):
    """Whatever was trained before is the same in both: neither figures nor curves count it."""
    first, second, other = (make_run(steps=6, name=name) for name in ("first", "second", "other"))
    facts = {"forked_from": {"run": str(first.absolute()), "step": 4}}
    runs = [read_history(first), replace(read_history(second), facts=facts)]
    assert forked_at(runs) == 4
    part = since(runs[0], 4)
    assert part.steps.tolist() == [5, 6] and len(part.batches) == len(part.series("loss")) == 2
    assert part.pooled("loss") == runs[0].pooled("loss", runs[0].steps > 4)
    assert "Up to step 4 these are one run" in render_comparison(runs)
    assert forked_at([runs[1], replace(read_history(other), facts=facts)]) == 4, "two forks of one run"
    assert forked_at([runs[1], read_history(other)]) is None and forked_at([runs[0], read_history(other)]) is None
