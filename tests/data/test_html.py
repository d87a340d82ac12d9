"""What preparing found, in the run's HTML report."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.cli import main
from paceline.report.report import write_report


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def test_the_report_of_a_run_says_what_its_data_is(tmp_path: Path, chatml: str, write_rows: Callable[..., str]) -> None:
    rows = [chat(f"question {n}", f"The answer is {n}.", tags=["sums"] if n % 2 else []) for n in range(40)]
    data = write_rows([*rows, "{broken <b>", rows[0], {"messages": []}])
    run = tmp_path / "run"
    run.mkdir()
    text = f"run_dir: {run}\ntarget: {{path: {chatml}}}\ndata: {{train: ['{data}'], heldout_share: 0.2}}\n"
    (run / "settings.yaml").write_text(text + "drafter: {num_anchors: 3}\n", encoding="utf-8")
    assert main(["prepare", str(run / "settings.yaml")]) == 0
    html = write_report(run).read_text(encoding="utf-8")
    section = html.split('<section id="prepared">')[1].split("</section>")[0]
    seen = " ".join(re.sub(r"<[^>]+>", " ", section).split())
    for words in (
        "rows read 43",
        "an epoch, blocks of",
        "at most 3 a sample",
        "held out",
        "its document is held out (data.heldout_share)",
        "not valid JSON 1",
        "the same tokens came earlier",
        "rows × 6 epochs =",
        "published recipes",
        "sums",
        "tokens a sample",
        "▮",
    ):
        assert words in seen, words
    assert "{broken <b>" not in section and "{broken &lt;b&gt;" in section
    assert main(["prepare", str(run / "settings.yaml"), "--drafter.num_anchors", "5"]) == 0
    assert "at most 5 a sample" in write_report(run).read_text(encoding="utf-8")
    (run / "store" / "manifest.json").write_text("{", encoding="utf-8")
    assert "manifest.json: cannot be read" in write_report(run).read_text(encoding="utf-8")
