from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from paceline.cli import report as command
from paceline.cli.command import guarded
from paceline.errors import RunDirectoryError
from paceline.observe.metrics_file import read_lines
from paceline.observe.run_history import read_history
from paceline.report import plots
from paceline.report.report import write_report
from paceline.report.svg import condensed, smoothed

VOID = {"meta", "link", "br", "img", "input"}


HEADINGS = (
    "Summary", "Loss", "Loss by length bucket", "Acceptance length τ", "By slot, last tenth of the run", "Data",
    "Which lengths trained when", "Sample length", "Padding", "Gradient norm", "Stage: target", "Environment",
    "Decoding held-out prompts", "Configuration", "Plan and padding", "Draft positions a second",
)  # fmt: skip


EVALUATION = {
    "slots": [{"slot": 1, "conditional": 0.7}, {"slot": 2, "conditional": None}],
    "by_tag": {"code": {"tau": 3.25, "passes": 4, "tokens": 13}},
    "rows": [{"id": "p-1", "tau": 2.5, "accepted": [3, 0]}],
}


class Checker(html.parser.HTMLParser):
    """Collects ids, links and whatever would be fetched; checks that elements nest."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in values:
            self.ids.append(values["id"])
        target = values.get("href") or values.get("src")
        if target and target.startswith("#"):
            self.links.append(target[1:])
        elif target and not target.startswith("data:"):
            self.fetched.append(target)
        assert tag != "script"

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings.append(data)


def checked(path) -> tuple[Checker, str]:
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    return checker, text


def test_the_report_of_a_run_is_one_file_whose_links_work(make_run):
    run_dir = make_run()
    (run_dir / "evaluation.json").write_text(
        json.dumps(
            {"evaluations": [{"step": 40, "tau_micro": 2.75, "lossless": {"equal": 7, "checked": 8}} | EVALUATION]}
        )
    )
    checker, text = checked(write_report(run_dir))
    assert checker.fetched == []
    assert len(set(checker.ids)) == len(checker.ids)
    assert set(checker.links) <= set(checker.ids)
    assert re.search(r"url\(['\"]?(?!#)", text) is None
    assert len(text) < 3_000_000
    wanted = [
        "Summary",
        "Loss",
        "Loss by length bucket",
        "Acceptance length τ",
        "By slot, last tenth of the run",
        "Data",
    ]
    wanted += [
        "Which lengths trained when",
        "Sample length",
        "Padding",
        "Gradient norm",
        "Stage: target",
        "Environment",
    ]
    wanted += ["Decoding held-out prompts", "Configuration", "Plan and padding", "Draft positions a second"]
    assert set(wanted) <= set(checker.headings)
    assert "What is missing" not in checker.headings
    assert "2.75" in text and "7 of 8" in text and "small" in text and "token_budget" in text
    assert "▮▮▮▯ ▯" in text and "3.25" in text and "τ by tag" in text
    assert "#01" not in text and "#02" not in text and "#03" not in text


def test_the_bucket_table_equals_a_recount(make_run):
    run_dir = make_run(steps=30)
    history = read_history(run_dir)
    lines = [line for line in read_lines(run_dir / "metrics.jsonl")[0] if line.__class__.__name__ == "StepLine"]
    for bucket in range(4):
        name = f"loss/bucket_{bucket}"
        pairs = [(line.values[name], line.weights[name]) for line in lines if name in line.values]
        expected = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
        assert history.pooled(name) == pytest.approx(expected)
    assert history.pooled("window/samples") == 12
    assert np.isnan(history.pooled("tree/tau_16"))


def test_a_state_of_a_stage_looks_the_same_on_every_plot(make_run):
    """The feed is never starved; its blocked time must not be drawn as another stage's starved time."""
    run_dir = make_run(steps=8)
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace("stage/target/busy", "stage/feed/busy").replace("target/bl", "feed/bl"))
    feed, drafter = (plots.stage(read_history(run_dir), name) for name in ("feed", "drafter"))
    assert "var(--s3)" in feed and "var(--s1)" not in feed and ">blocked<" in feed
    assert "var(--s2)" in drafter and ">busy<" in drafter


def test_queues_and_memory_are_in_the_report(make_run):
    text = checked(write_report(make_run(steps=4)))[1]
    assert re.search(r'<th scope="row">memory of trainer</th><td>[\d.]+ [MG]B</td><td>[\d.]+ [MG]B</td>', text)
    assert '<th scope="row">queue features</th><td>3</td><td>2.05 kB</td>' in text


def test_an_unknown_directory_is_one_clear_line(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(
        RunDirectoryError, match=r"no run in there .metrics.jsonl, settings.yaml and run.json are missing."
    ):
        write_report(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"is a file; give the directory of a run"):
        write_report(tmp_path / "a.txt")
    with pytest.raises(RunDirectoryError, match=r"does not exist; give the directory of a run"):
        write_report(tmp_path / "nothing")
    assert not (tmp_path / "report.html").exists()


def test_a_foreign_metrics_file_is_one_clear_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n{"loss": 2}\n')
    with pytest.raises(RunDirectoryError, match="not a metrics file of paceline"):
        write_report(tmp_path)


@pytest.mark.parametrize("missing", ["metrics.jsonl", "settings.yaml", "evaluation.json"])
def test_a_half_written_run_gets_a_partial_report_that_says_what_is_missing(make_run, missing):
    run_dir = make_run(steps=3)
    (run_dir / "evaluation.json").write_text('{"evaluations": []}')
    (run_dir / missing).unlink()
    checker, text = checked(write_report(run_dir))
    assert "What is missing" in checker.headings
    assert f"<li>{missing} is missing" in text
    assert ("Loss" in checker.headings) == (missing != "metrics.jsonl")


@pytest.mark.parametrize("content", ["", "[1, 2]", "{", "\x00", "a: [", "text"])
@pytest.mark.parametrize("name", ["settings.yaml", "run.json", "evaluation.json"])
def test_a_damaged_file_beside_the_metrics_costs_its_own_content_only(make_run, name, content):
    run_dir = make_run(steps=2)
    (run_dir / name).write_text(content)
    run = read_history(run_dir)
    assert [note.split()[0] for note in run.notes if not note.startswith("evaluation.json is missing")] == [name]
    assert run.steps.tolist() == [1, 2]


@pytest.mark.parametrize("share", [0.02, 0.5, 0.83])
def test_metrics_cut_in_the_middle_of_a_line_give_a_partial_report(make_run, share):
    run_dir = make_run(steps=12)
    path = run_dir / "metrics.jsonl"
    raw = path.read_bytes()
    cut = raw[: max(int(len(raw) * share), 200)]
    path.write_bytes(cut)
    run = read_history(run_dir)
    assert run.status == "not closed" and any("the last line is half written" in note for note in run.notes)
    assert run.steps.tolist() == list(range(1, cut.count(b"\n")))  # one whole line is the header


def test_an_empty_metrics_file_gives_a_partial_report(make_run):
    run_dir = make_run(steps=1)
    (run_dir / "metrics.jsonl").write_bytes(b"")
    _, text = checked(write_report(run_dir))
    assert "metrics.jsonl has no optimizer step yet" in text


def test_a_run_of_another_version_says_so(make_run):
    run_dir = make_run(steps=2)
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace('"format":1', '"format":7').replace('"tau"', '"acceptance_length"'))
    checker, text = checked(write_report(run_dir))
    assert "metrics.jsonl has format 7, this version writes 1" in text
    assert "Loss" in checker.headings and "Acceptance length τ" not in checker.headings


def test_text_of_the_run_cannot_break_the_page(make_run, tmp_path):
    run_dir = make_run(steps=2)
    (run_dir / "run.json").write_text(json.dumps({"<script>alert(1)</script>": "</table><b>"}))
    moved = tmp_path / "a<b>&"
    shutil.move(run_dir, moved)
    checked(write_report(moved))


def test_the_command_writes_the_file_and_says_where(make_run, tmp_path, capsys):
    run_dir = make_run(steps=2)
    assert guarded(command.run, [str(run_dir), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").is_file() and not (run_dir / "report.html").exists()
    assert guarded(command.run, [str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.strip() == f"error: {tmp_path}/none: does not exist; give the directory of a run"
    assert guarded(command.run, [str(run_dir), "--out", str(tmp_path / "no" / "page.html")]) == 1
    assert "cannot be written (No such file or directory); give another --out" in capsys.readouterr().err


def test_help_needs_no_plotting_and_no_torch():
    program = (
        "import sys\nfrom paceline.cli import report\n"
        "try: report.run(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'matplotlib', 'transformers'} & set(sys.modules), 'too much is imported'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "paceline report runs/first" in done.stdout


def test_smoothing_is_a_moving_ratio_of_sums():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=200), rng.uniform(1, 3, size=200)
    values[17], weights[40] = np.nan, np.nan
    result = smoothed(values, weights, share=0.05)
    for i in range(200):
        near = [j for j in range(max(i - 5, 0), min(i + 6, 200)) if j not in (17, 40)]
        assert result[i] == pytest.approx(sum(values[j] * weights[j] for j in near) / sum(weights[j] for j in near))


def test_condensing_keeps_the_mean_of_each_stretch():
    x, y = np.arange(1000), np.arange(1000) % 7 * 1.0
    few_x, few_y = condensed(x, y, points=10)
    assert few_x == pytest.approx([np.mean(x[i : i + 100]) for i in range(0, 1000, 100)])
    assert few_y == pytest.approx([np.mean(y[i : i + 100]) for i in range(0, 1000, 100)])
