"""Reports on runs whose files hold what they should not: one clear line or a partial report, always small."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from observe.store_files import write_manifest
from observe.test_report import checked
from paceline.errors import RunDirectoryError
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.metrics_file import MetricsFile, read_lines
from paceline.observe.run_history import read_history
from paceline.report.comparison import render_comparison, write_comparison
from paceline.report.data_section import prepared_data
from paceline.report.decoding import decoded_slots, decoding
from paceline.report.plots import decoded_tau
from paceline.report.report import write_report

MakeRun = Callable[..., Path]
LIMIT = 3_000_000


def changed(run_dir: Path, number: int, **fields: Any) -> None:
    """Change fields of one line of the metrics."""
    path = run_dir / "metrics.jsonl"
    rows = path.read_text().splitlines()
    row = json.loads(rows[number])
    for name, value in fields.items():
        row[name] = {**row[name], **value} if isinstance(value, dict) else value
    rows[number] = json.dumps(row)
    path.write_text("\n".join(rows) + "\n")


def page_of(run_dir: Path) -> str:
    """The report, checked for what must hold whatever a file says."""
    _, text = checked(write_report(run_dir))
    assert len(text.encode()) < LIMIT
    assert re.search(r"(?i)(?<![a-z])nan(?![a-z])", re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)) is None
    return text


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ("plan: 5\n", "settings.yaml: plan is 5, a mapping belongs there; it is left out"),
        ("data: x\n", "settings.yaml: data is 'x', a mapping belongs there; it is left out"),
        ("plan: [1, 2]\noptimizer: null\n", "settings.yaml: plan is [1, 2], a mapping"),
        ("optimizer:\n", "settings.yaml: optimizer is empty, a mapping belongs there"),
        ("", "settings.yaml is empty: what was asked for is unknown"),
        ("{}", "settings.yaml is empty"),
    ],
)
def test_settings_of_the_wrong_kind_are_named(make_run: MakeRun, settings: str, note: str) -> None:
    run_dir = make_run(steps=25)
    (run_dir / "settings.yaml").write_text(settings)
    assert f"<li>{note}" in page_of(run_dir).replace("&#x27;", "'")


@pytest.mark.parametrize(
    "settings",
    [
        f"train: {{epochs: {10**400}}}\ndata: {{store: 5}}",
        "data: {store: [a]}",
        "optimizer: {clip_norm: x, warmup: .inf}\nflow: {target_devices: 3, mode: {a: 1}}",
        f"optimizer: {{clip_norm: {10**400}, warmup: {10**400}}}\nplan: {{strategy: [a], schedule: {{b: 1}}}}",
    ],
)
def test_values_of_the_wrong_kind_do_no_harm(make_run: MakeRun, settings: str) -> None:
    run_dir = make_run(steps=60)
    (run_dir / "settings.yaml").write_text(settings)
    assert "Gradient norm" in page_of(run_dir)


@pytest.mark.parametrize("edges", [7, {"a": 1}, [None, "y", {}, 3], [1e400]])
def test_bucket_edges_that_are_no_list_of_lengths_are_left_out(make_run: MakeRun, edges: Any) -> None:
    run_dir = make_run(steps=3)
    changed(run_dir, 0, header={"bucket_edges": edges})
    text = page_of(run_dir)
    assert "bucket 3" in text and "(≤" not in text


@pytest.mark.parametrize(
    "fields",
    [{"step": 2**63}, {"epoch": 2**80}, {"window": -1}, {"steps": 0}],
)
def test_a_line_out_of_range_is_left_out_and_counted(make_run: MakeRun, fields: dict[str, Any]) -> None:
    run_dir = make_run(steps=5)
    changed(run_dir, 3, **fields)
    text = page_of(run_dir)
    assert "1 of 7 lines cannot be read and are left out (line 4)" in text and "no metrics of step 3" in text


@pytest.mark.parametrize("value", [1e308, -1e308, 1e39, 1e-320])
def test_numbers_beyond_all_measure_do_no_harm(make_run: MakeRun, value: float) -> None:
    run_dir = make_run(steps=50)
    for line, name in enumerate(("loss", "gradient/norm_max", "window/mean_length", "accuracy/slot_1"), 20):
        changed(run_dir, line, values={name: value}, weights={name: abs(value)})
    text = page_of(run_dir)
    assert ("4 values beyond 1e+40 are left out" in text) == (abs(value) > 1e40)
    render_comparison([read_history(run_dir)] * 2)


def test_a_number_that_no_float_holds_costs_its_line(make_run: MakeRun) -> None:
    run_dir = make_run(steps=3)
    changed(run_dir, 2, values={"loss": 10**400})
    _, notes = read_lines(run_dir / "metrics.jsonl")
    assert notes == ["metrics.jsonl: 1 of 5 lines cannot be read and are left out (line 3)"]


def test_metrics_that_are_all_missing_are_dashes(make_run: MakeRun) -> None:
    run_dir = make_run(steps=30)
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    for row in rows:
        if row["kind"] == "step":
            row["values"] = dict.fromkeys(row["values"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "<dt>training τ</dt><dd>–<" in page_of(run_dir)


def test_a_bucket_that_only_some_lines_know_has_no_nan(make_run: MakeRun) -> None:
    run_dir = make_run(steps=30)
    changed(run_dir, 5, values={"samples/bucket_9": 3.0})
    assert '<th scope="row">bucket 9</th>' in page_of(run_dir)


@pytest.mark.parametrize(
    "names",
    [
        ["samples/bucket_999999", "loss/bucket_999999"],
        [f"samples/bucket_{number}" for number in range(5000)] + [f"loss/bucket_{number}" for number in range(5000)],
        [f"stage/s{number}/busy" for number in range(500)],
        [f"tree/tau_{number}" for number in range(1000)],
        [f"accuracy/slot_{number}" for number in range(5000)],
        [f"loss/tag_{number}" for number in range(5000)],
        [f"objective/{'x' * 5000}{number}" for number in range(100)],
    ],
)
def test_names_without_measure_make_no_large_page_and_are_counted(make_run: MakeRun, names: list[str]) -> None:
    run_dir = make_run(steps=30)
    for line in range(1, 31):
        changed(run_dir, line, values=dict.fromkeys(names, 0.5 + line / 100))
    text = page_of(run_dir)
    if len(names) > 1000:
        assert "are left out" in text


def test_unknown_metrics_are_left_out_by_name(make_run: MakeRun) -> None:
    run_dir = make_run(steps=3)
    changed(run_dir, 1, values={'stage/"><b>\\1/busy': 0.5, "bogus": 1.0})
    text = page_of(run_dir)
    assert "2 metrics that this version does not know are left out" in text and "bogus" in text


def long_run(run_dir: Path) -> None:
    (run_dir / "settings.yaml").write_text("".join(f"k{number}: {'v' * 500}\n" for number in range(1500)))
    (run_dir / "run.json").write_text(json.dumps({f"f{number}": "v" * 500 for number in range(3000)}))


def many_events(run_dir: Path) -> None:
    event = {"kind": "event", "step": 1, "time": 1.0, "event": "note", "fields": {"text": "w" * 20_000}}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for _ in range(400))
        header = {"kind": "header", "step": 1, "time": 1.0, "format": 1, "total_steps": 3, "header": {}}
        file.writelines(json.dumps(header) + "\n" for _ in range(3000))


def large_evaluations(run_dir: Path) -> None:
    row = {"id": "p" * 5000, "tau": 2.0, "accepted": [10**9, 3], "pieces": ["t" * 300] * 500}
    groups = {f"tag{number}" * 9: {"tau": 2.0, "passes": 1, "tokens": 1} for number in range(2000)}
    entry = {"tau_micro": 2.0, "rows": [row] * 14, "by_tag": groups, "by_context": groups}
    (run_dir / "evaluation.json").write_text(
        json.dumps({"evaluations": [entry | {"step": step} if step > 298 else {"step": step} for step in range(300)]})
    )


def large_store(run_dir: Path) -> None:
    tags = {f"tag{number}" * 50: {"samples": 1, "tokens": 1, "supervised_tokens": 1} for number in range(5000)}
    reasons = {f"r{number}": {"count": 1, "example": "e" * 5000, "detail": "d" * 5000} for number in range(500)}
    write_manifest(run_dir, tags=tags, set_aside=reasons, warnings=["w" * 5000] * 500)


def test_many_evaluations_are_drawn_and_few_are_columns(make_run: MakeRun) -> None:
    run_dir = make_run(steps=30)
    evaluations = [{"step": step, "tau_micro": 1.0 + step / 100, "num_prompts": 4} for step in range(100)]
    (run_dir / "evaluation.json").write_text(json.dumps({"evaluations": evaluations}))
    assert [step for step, _ in decoded_tau(read_history(run_dir))] == list(range(100))
    text = page_of(run_dir)
    columns = re.search(r"<thead>(?:(?!</thead>).)*>step 0<.*?</thead>", text)
    assert columns is not None and re.findall(r"step (\d+)", columns.group(0)) == ["0", *map(str, range(93, 100))]
    assert "The first and the newest 7 of 100 evaluations." in text


@pytest.mark.parametrize("make_large", [long_run, many_events, large_evaluations, large_store])
def test_a_report_stays_small_whatever_the_files_hold(make_run: MakeRun, make_large: Callable[[Path], None]) -> None:
    run_dir = make_run(steps=30)
    make_large(run_dir)
    text = page_of(run_dir)
    assert "left out" in text or "more" in text
    path = write_comparison([run_dir] * 3, run_dir / "both.html")
    assert path.stat().st_size < LIMIT


def test_many_runs_still_make_a_small_comparison(make_run: MakeRun) -> None:
    run_dir = make_run(steps=400)
    path = write_comparison([run_dir] * 40, run_dir / "both.html")
    assert path.stat().st_size < LIMIT
    checked(path)


ODD_EVALUATIONS: list[dict[str, Any]] = [
    {"step": "x"}, {"step": None, "tau_micro": 2.0}, {"step": 10**30, "tau_micro": 2.0}, {"step": True}, {},
    {"step": 2, "tau_micro": 1e999}, {"step": 3, "tau_micro": float("nan")}, {"step": 3, "tau_micro": True},
    {"step": 3, "slots": [{"conditional": 0.4}, {"slot": "a", "conditional": 1}], "by_context": []},
    {"step": 3, "tau_micro": "high", "training_tau": []}, {"step": 3, "by_tag": {"a": {"tau": {}}}, "slots": 7},
    {"step": 3, "rows": [{"accepted": ["a", None, -3], "pieces": [1, None]}], "lossless": {"equal": []}},
    {"step": 3, "rows": 5, "lossless": 5, "training_agrees": {}},
]  # fmt: skip


def test_evaluations_of_the_wrong_kind_do_no_harm(make_run: MakeRun) -> None:
    run_dir = make_run(steps=30)
    path = run_dir / "evaluation.json"
    path.write_text(json.dumps({"evaluations": [{"step": 1, "tau_micro": 1.5}, *ODD_EVALUATIONS]}))
    assert "evaluation.json: entries without a step are left out" in page_of(run_dir)
    for entry in ODD_EVALUATIONS:
        path.write_text(json.dumps({"evaluations": [{"step": 1, "tau_micro": 1.5}, entry]}))
        run = read_history(run_dir)
        diagnose(run)
        assert "nan" not in decoding(run) and decoded_tau(run)[0] == (1, 1.5)
        assert all(isinstance(rate, float) for rate in decoded_slots(run).values())


def test_spike_events_of_the_wrong_kind_do_no_harm(make_run: MakeRun) -> None:
    run_dir = make_run(steps=60)
    changed(run_dir, 50, values={"gradient/norm_max": 99.0})
    before = (run_dir / "metrics.jsonl").read_text()
    for fields in (
        {"batches": 5}, {"batches": ["a"]}, {"highest_loss": {"a": "b"}}, {"highest_loss": 3, "samples": {"a": 1}},
        {"epoch": [], "window": {}, "samples": [None, 2.5, "x"]},
    ):  # fmt: skip
        event = {"kind": "event", "step": 50, "time": 1.0, "event": "gradient-spike", "fields": fields}
        (run_dir / "metrics.jsonl").write_text(before + json.dumps(event) + "\n")
        texts = [finding.text for finding in diagnose(read_history(run_dir)) if finding.key == "gradient-spikes"]
        assert texts[0].startswith("1 gradient spike: step 50")
    page_of(run_dir)


def test_a_damaged_store_is_named(make_run: MakeRun) -> None:
    run_dir = make_run(steps=3)
    run = read_history(run_dir)
    for manifest in ("{}", "[]", '{"report": 5}', '{"report": {"tokens": "x"}}', "{"):
        (run_dir / "store" / "manifest.json").write_text(manifest)
        assert "manifest.json: cannot be read" in prepared_data(run)
    page_of(run_dir)


def test_a_missing_store_is_named(make_run: MakeRun) -> None:
    run_dir = make_run(steps=3)
    (run_dir / "store" / "manifest.json").unlink()
    text = page_of(run_dir)
    assert f"{run_dir / 'store'}: no prepared store there (manifest.json is missing)" in text
    assert "What is missing" in text


def test_nesting_without_end_is_no_traceback(make_run: MakeRun) -> None:
    run_dir = make_run(steps=3)
    (run_dir / "run.json").write_text('{"a":' * 100_000)
    (run_dir / "settings.yaml").write_text("[" * 5000)
    text = page_of(run_dir)
    assert "run.json cannot be read" in text and "settings.yaml cannot be read" in text


@pytest.mark.parametrize(
    "row",
    ['{"kind":"step","step":2}', '{"kind":"step","step":2,"time":1.0,"steps":1,"epoch":0,"window":0,"batches":7}'],
)
def test_a_step_line_that_lacks_something_is_one_clear_line_on_resume(make_run: MakeRun, row: str) -> None:
    run_dir = make_run(steps=2)
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], row]) + "\n")
    before = path.read_bytes()
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl:3: not a metric line .*move the file away"):
        MetricsFile(path, 2)
    assert path.read_bytes() == before
    assert len(read_lines(path)[1]) == 1


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", ["metrics.jsonl", "settings.yaml"])
def test_a_report_is_never_written_over_what_is_no_page(make_run: MakeRun, name: str, several: bool) -> None:
    run_dir = make_run(steps=25)
    before = (run_dir / name).read_bytes()
    with pytest.raises(
        RunDirectoryError, match=f"{name}: is no page of paceline and would be lost; give another --out"
    ):
        write_comparison([run_dir, run_dir], run_dir / name) if several else write_report(run_dir, run_dir / name)
    assert (run_dir / name).read_bytes() == before
    page = write_report(run_dir, run_dir / "page.html")
    assert write_report(run_dir, page) == page  # its own page is renewed


@pytest.mark.parametrize("text", ["plan: &p\n  x: *p\n", "- &a\n  - {b: [*a]}\n", "a: &a {b: &b {c: *a}}\n"])
def test_settings_that_hold_themselves_are_left_out(make_run: MakeRun, text: str) -> None:
    run_dir = make_run(steps=25)
    (run_dir / "settings.yaml").write_text(text)
    assert "settings.yaml has a part that holds itself and is left out" in page_of(run_dir)


def test_settings_may_share_a_part(make_run: MakeRun) -> None:
    run_dir = make_run(steps=25)
    (run_dir / "settings.yaml").write_text(
        "plan: &p {strategy: grid, more: &m [1]}\ntrain: {a: *p, b: *p, c: [*m, *m]}\n"
    )
    assert read_history(run_dir).settings["train"]["b"] == {"strategy": "grid", "more": [1]}


def test_lines_that_repeat_steps_count_once(make_run: MakeRun) -> None:
    run_dir = make_run(steps=25)
    path = run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    run = read_history(run_dir)
    assert run.steps.tolist() == list(range(1, 26))
    assert "25 lines repeat steps that earlier lines cover, and are left out" in run.notes
