from __future__ import annotations

import base64
import html.parser
import json
import re
import shutil
import subprocess
import sys

import pytest

from observed_runs import write_manifest
from paceline.cli import report as command
from paceline.cli.command import guarded
from paceline.errors import RunDirectoryError
from paceline.report.drawing import SERIES
from paceline.report.page import _sentence
from paceline.report.report import write_report

VOID = {"meta", "link", "br", "img", "input"}


EVALUATION = {
    "step": 40,
    "num_prompts": 8,
    "passes": 9,
    "tau_micro": 2.75,
    "lossless": {"equal": 7, "prompts": 8},
    "slots": [{"slot": 1, "conditional": 0.7}, {"slot": 2, "conditional": None}],
    "by_tag": {
        "code": {"tau": 3.25, "passes": 4, "tokens": 13},
        "on-every-row": {"tau": 2.75, "passes": 9, "tokens": 25},
    },
    "rows": [{"id": "p-1", "tau": 2.5, "accepted": [1], "pieces": ["One", " two", " <three>"]}],
    "conditions": {"max_new_tokens": 64, "temperature": 0.0, "dtype": "float32"},
}
OTHER = {"step": 40, "num_prompts": 4, "tau_micro": 1.5, "conditions": {"max_new_tokens": 24, "temperature": 0.8}}


def evaluated(run_dir):
    (run_dir / "evaluation.json").write_text(json.dumps({"evaluations": [EVALUATION], "others": [OTHER]}))
    return run_dir


def drawings(text):
    """Title and SVG of each figure."""
    found = re.findall(r'<h3>([^<]*)</h3><img src="data:image/svg\+xml;base64,([^"]+)"', text)
    return {title: base64.b64decode(source).decode() for title, source in found}


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


def test_the_report_is_one_file_whose_links_work(make_run):
    checker, text = checked(write_report(evaluated(make_run())))
    assert checker.fetched == []
    assert len(set(checker.ids)) == len(checker.ids)
    assert set(checker.links) == set(checker.ids)
    assert re.search(r"url\(['\"]?(?!#)", text) is None and len(text) < 3_000_000
    wanted = {
        *("Summary", "Loss", "Loss by length bucket", "Acceptance length τ", "By slot, last tenth of the run"),
        *(
            "What was trained",
            "Which lengths trained when",
            "Sample length",
            "Padding",
            "Gradient norm",
            "Learning rate",
        ),
        *("Stage: target", "Environment", "Decoding held-out prompts", "Configuration", "Draft positions a second"),
    }
    assert wanted <= set(checker.headings) and "What is missing" not in checker.headings


def test_every_drawing_has_its_marks(make_run):
    text = write_report(evaluated(make_run())).read_text(encoding="utf-8")
    found = drawings(text)
    names = {
        "Loss": ["smoothed"],
        "Acceptance length τ": ["training", "decoded ◇"],
        "Sample length": ["mean", "longest"],
    }
    names["Which lengths trained when"] = names["Loss by length bucket"] = [f"bucket {bucket}" for bucket in range(4)]
    for title, labels in names.items():
        assert re.findall(r">([^<>]+)</text>", found[title]) and all(
            f">{label}</text>" in found[title] for label in labels
        )
    for title, svg in found.items():
        assert svg.count("<path") > 10, title
        assert "nan" not in svg.lower(), title


def test_training_and_held_out_are_in_one_picture(make_run):
    run_dir = make_run(validated=True)
    svg = drawings(write_report(evaluated(run_dir)).read_text(encoding="utf-8"))["Acceptance length τ"]
    assert all(f">{label}</text>" in svg for label in ("training", "held-out", "decoded ◇"))


def test_the_evaluation_is_shown_with_what_made_it(make_run):
    text = write_report(evaluated(make_run())).read_text(encoding="utf-8")
    assert "2.75" in text and "7 of 8" in text and "3.25" in text
    assert "on-every-row" not in text  # a tag that every row has separates nothing
    assert "decoded: 8 prompts, ≤ 64 tokens, greedy, float32" in text
    assert "4 prompts, ≤ 24 tokens, temperature 0.8" in text and "1.50" in text
    assert "<b>One</b><u> two</u><b> &lt;three&gt;</b><i>│</i>" in text and "▮▯" in text


@pytest.mark.parametrize(("agrees", "word"), [(True, "yes"), (False, "no"), (None, "–")])
def test_training_against_decoding_is_a_row(make_run, agrees, word):
    run_dir = make_run()
    entry = EVALUATION | {"training_tau": 2.6, "loop_tau": 2.5, "training_agrees": agrees}
    (run_dir / "evaluation.json").write_text(json.dumps({"evaluations": [entry]}))
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert f'<th scope="row">training and decoding within 2.0 %</th><td>{word}</td>' in text
    assert ("the training forward counts τ 2.600 and decoding 2.500" in text) == (agrees is False)


def test_findings_have_their_advice(make_run):
    text = write_report(make_run(skipped=(39, 40))).read_text(encoding="utf-8")
    assert '<li class="warning"><b>Warning</b>2 steps were skipped' in text
    assert "<small>Lower optimizer.lr or look at the samples of that step.</small>" in text


def test_an_advice_that_begins_with_a_setting_keeps_its_name():
    assert _sentence("plan.strategy: grid wastes least") == "plan.strategy: grid wastes least."
    assert _sentence("raise plan.accumulate") == "Raise plan.accumulate."


def test_captions_say_what_a_line_is(make_run):
    single = write_report(make_run(name="a")).read_text(encoding="utf-8")
    many = write_report(make_run(name="b", changes={"every_steps": 5})).read_text(encoding="utf-8")
    assert "Gray: every step;" in single and "each line of 5 steps" not in single
    assert "Gray: each line of 5 steps;" in many and "every step" not in many
    assert "mixture inside a line cannot be seen here" in many


@pytest.mark.parametrize("every", [1, 8])
def test_in_steps_counts_steps_and_not_lines(make_run, every):
    """Bucket 3 is in every second step."""
    text = write_report(make_run(changes={"every_steps": every}, alternate=True)).read_text(encoding="utf-8")
    head, *rows = re.findall(r"<tr>(.*?)</tr>", text[text.index('id="data"') :], re.DOTALL)[:5]
    column = re.findall(r"<th[^>]*>(.*?)</th>", head).index("in steps")
    shares = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)[column] for row in rows]
    assert shares[3] == "50 %"


def test_workers_are_a_table(make_run):
    text = write_report(make_run()).read_text(encoding="utf-8")
    row = '<th scope="row">target 1</th><td>0</td><td>0</td><td>0 %</td><td>–</td><td>–</td><td>–</td>'
    assert row in text and '<th scope="row">target 0</th><td>80</td><td>400</td><td>80 %</td><td>500</td>' in text


def test_a_state_of_a_stage_looks_the_same_everywhere(make_run):
    """The feed is never starved; its blocked time must not be drawn as another stage's starved time."""
    run_dir = make_run(steps=8)
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace("stage/target/busy", "stage/feed/busy").replace("target/bl", "feed/bl"))
    found = drawings(write_report(run_dir).read_text(encoding="utf-8"))
    feed, drafter = found["Stage: feed"], found["Stage: drafter"]
    assert SERIES[3] in feed and SERIES[1] not in feed and ">blocked<" in feed
    assert SERIES[2] in drafter and ">busy<" in drafter


def test_queues_and_memory_are_in_the_report(make_run):
    text = checked(write_report(make_run(steps=4)))[1]
    assert re.search(r'<th scope="row">trainer</th><td>[\d.]+ [MG]iB</td><td>[\d.]+ [MG]iB</td>', text)
    assert '<th scope="row">features</th><td>3</td><td>2.0 KiB</td>' in text


def test_a_missing_store_is_named(make_run):
    run_dir = make_run(steps=3)
    (run_dir / "store" / "manifest.json").unlink()
    text = checked(write_report(run_dir))[1]
    assert f"{run_dir / 'store' / 'manifest.json'}: cannot be read (No such file or directory)" in text


def test_tags_on_every_row_are_not_tabulated(make_run):
    run_dir = make_run(steps=3)
    every = {"samples": 48, "tokens": 9_600, "supervised_tokens": 4_000}
    write_manifest(run_dir, tags={"code": {**every, "samples": 20}, "script:latin": every})
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert '<th scope="row">code</th>' in text and "script:latin" not in text


@pytest.mark.parametrize("name", ["metrics.jsonl", "settings.yaml"])
def test_a_report_is_never_written_over_a_runs_files(make_run, name):
    run_dir = make_run(steps=25)
    before = (run_dir / name).read_bytes()
    with pytest.raises(RunDirectoryError, match=rf"{name}: is not a page and would be lost; give another --out"):
        write_report(run_dir, run_dir / name)
    assert (run_dir / name).read_bytes() == before
    page = write_report(run_dir, run_dir / "page.html")
    assert write_report(run_dir, page) == page  # its own page is renewed


def test_an_unknown_directory_is_one_clear_line(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(
        RunDirectoryError, match=r"no run in there .metrics.jsonl, settings.yaml and run.json are missing."
    ):
        write_report(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"is a file; give the directory of a run"):
        write_report(tmp_path / "a.txt")
    with pytest.raises(RunDirectoryError, match=r"no such folder; give the directory of a run"):
        write_report(tmp_path / "nothing")
    assert not (tmp_path / "report.html").exists()


def test_a_foreign_metrics_file_is_one_clear_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n{"loss": 2}\n')
    with pytest.raises(RunDirectoryError, match="not a metrics file of paceline"):
        write_report(tmp_path)


@pytest.mark.parametrize("missing", ["metrics.jsonl", "settings.yaml", "evaluation.json"])
def test_a_partial_report_says_what_is_missing(make_run, missing):
    run_dir = make_run(steps=3)
    evaluated(run_dir)
    (run_dir / missing).unlink()
    checker, text = checked(write_report(run_dir))
    assert "What is missing" in checker.headings
    assert f"<li>{missing} is missing" in text
    assert ("Loss" in checker.headings) == (missing != "metrics.jsonl")


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
    assert capsys.readouterr().err.strip() == f"error: {tmp_path}/none: no such folder; give the directory of a run"
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
