"""Held-out documents: whole, the same whatever the order, never in the store, and what evaluation uses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.evaluate import Arguments, source_of
from paceline.cli.prepare import prepare_heldout
from paceline.config import DataConfig, load_settings
from paceline.data.holdout import HELDOUT, heldout_files, is_held_out
from paceline.data.prepare import prepare
from paceline.data.report import PrepareReport
from paceline.data.store import open_store
from paceline.drafter.anchors import count_eligible
from paceline.errors import ConfigError, DataError

Write = Callable[..., str]


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


ROWS = [chat(f"question {n}", f"The answer is {n * n}.", document=f"book {n % 17}") for n in range(60)]


def run(files: list[str], store: Path, tokenizer: str, **settings: Any) -> PrepareReport:
    config = DataConfig(**{"heldout_share": 0.3, **settings})
    return prepare(files, store, tokenizer, config, count_eligible=count_eligible)


def sides(store: Path, rows_of: dict[str, list[dict[str, Any]]]) -> tuple[list[str], list[str]]:
    """Questions in the store and in the held-out file, sorted."""
    opened = open_store(store)
    trained: list[str] = []
    for row in range(len(opened)):
        file, line = opened.origin(row).rsplit(":", 1)
        trained.append(rows_of[file][int(line) - 1]["messages"][0]["content"])
    lines = (store / HELDOUT).read_text(encoding="utf-8").splitlines()
    return sorted(trained), sorted(json.loads(line)["messages"][0]["content"] for line in lines)


@pytest.mark.parametrize("workers", [1, 2])
def test_no_document_is_on_both_sides_whatever_the_order(
    workers: int, tmp_path: Path, chatml: str, write_rows: Write
) -> None:
    # Two files are two pieces, which two processes take.
    first = {write_rows(ROWS[:30], "a.jsonl"): ROWS[:30], write_rows(ROWS[30:], "b.jsonl"): ROWS[30:]}
    report = run(list(first), tmp_path / "store", chatml, workers=workers)
    trained, held = sides(tmp_path / "store", first)
    document = {row["messages"][0]["content"]: row["document"] for row in ROWS}
    assert sorted(trained + held) == sorted(document)
    assert not {document[question] for question in trained} & {document[question] for question in held}
    held_documents = {document[question] for question in held}
    assert held_documents == {f"book {n}" for n in range(17) if is_held_out(f'document "book {n}"'.encode(), 0.3)}
    assert 0 < len(held_documents) < 17
    assert (report.heldout_rows, report.heldout_documents) == (len(held), len(held_documents))
    assert report.set_aside["heldout_split"].count == len(held)
    assert report.rows_used + report.heldout_rows == report.rows_in == 60
    assert not any("are not used" in warning for warning in report.warnings)

    mixed = random.Random(workers).sample(ROWS, len(ROWS))
    second = {write_rows(mixed, "c.jsonl"): mixed}
    run(list(second), tmp_path / "other", chatml)
    assert sides(tmp_path / "other", second) == (trained, held)


def test_rows_without_a_document_go_by_their_first_question(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    rows = [chat(f"Question  {n % 20}" if n % 2 else f"question {n % 20}", f"answer {n}") for n in range(60)]
    later = [{"messages": [*row["messages"], *chat(f"more {n}", "yes")["messages"]]} for n, row in enumerate(rows)]
    file = write_rows([*rows, *later])
    run([file], tmp_path / "store", chatml)
    trained, held = sides(tmp_path / "store", {file: [*rows, *later]})
    groups = [{question.casefold().split()[-1] for question in side} for side in (trained, held)]
    assert groups[0] and groups[1] and not groups[0] & groups[1]
    assert len(trained) + len(held) == 120 and all(held.count(question) % 6 == 0 for question in held)


def test_the_share_is_what_is_asked() -> None:
    for share in (0.02, 0.3):
        held = sum(is_held_out(f"document {n}".encode(), share) for n in range(20_000))
        assert abs(held / 20_000 - share) < 4 * (share * (1 - share) / 20_000) ** 0.5
    # A larger share holds out what a smaller one does, and more.
    assert all(is_held_out(f"{n}".encode(), 0.3) for n in range(2000) if is_held_out(f"{n}".encode(), 0.02))


def test_nothing_is_held_out_without_a_share(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    report = run([write_rows(ROWS)], tmp_path / "store", chatml, heldout_share=0.0)
    assert report.heldout_rows == 0 and report.samples == 60 and not (tmp_path / "store" / HELDOUT).exists()
    one = write_rows([{**row, "document": "book 1"} for row in ROWS], "one.jsonl")
    small = run([one], tmp_path / "small", chatml, heldout_share=1e-9)
    assert "data.heldout_share 1e-09 holds out no document: there are too few" in small.warnings
    with pytest.raises(DataError, match=r"of 60 rows none can be trained on: 60 × its document is held out"):
        run([one], tmp_path / "all", chatml, heldout_share=1 - 1e-9)


def test_held_out_rows_keep_their_tags_and_come_once(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    often = write_rows([{**row, "tags": ["own", "code"]} for row in ROWS[:30]], "often.jsonl")
    rare = write_rows(ROWS[30:], "rare.jsonl")
    report = run([f"{often}#tag=code&weight=3", f"{rare}#weight=0.01"], tmp_path / "store", chatml)
    held = [json.loads(line) for line in (tmp_path / "store" / HELDOUT).read_text(encoding="utf-8").splitlines()]
    questions = {row["messages"][0]["content"]: row.get("tags") for row in held}
    first = [f"question {n}" for n in range(30) if is_held_out(f'document "book {n % 17}"'.encode(), 0.3)]
    second = [f"question {n}" for n in range(30, 60) if is_held_out(f'document "book {n % 17}"'.encode(), 0.3)]
    assert first and second and questions == {key: ["code", "own"] for key in first} | dict.fromkeys(second)
    assert len(held) == len(questions) == report.heldout_rows
    text = f"run_dir: {tmp_path / 'run'}\ntarget: {{path: {chatml}}}\ndata: {{train: ['{rare}'], heldout_share: 0.3}}\n"
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    settings = load_settings(tmp_path / "run.yaml", {"data.store": str(tmp_path / "store")})
    assert prepare_heldout(settings).tags["code"].samples == len(first)


def test_evaluation_uses_what_was_split_off(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    rows = write_rows(ROWS)
    text = f"run_dir: {tmp_path / 'run'}\ntarget: {{path: {chatml}}}\ndata: {{train: ['{rows}'], heldout_share: 0.3}}\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "run" / "run.json").write_text("{}", encoding="utf-8")
    arguments = Arguments((tmp_path / "run",))
    with pytest.raises(ConfigError, match=r"no data\.heldout and no data\.heldout_share"):
        source_of(tmp_path / "run", arguments, {})
    settings = load_settings(tmp_path / "run" / "settings.yaml", {})
    report = run([rows], settings.store_path, chatml)
    found, _ = source_of(tmp_path / "run", arguments, {})
    assert found.data.heldout == [str(settings.store_path / HELDOUT)]
    named, _ = source_of(tmp_path / "run", arguments, {"data.heldout": f"[{rows}]"})
    assert named.data.heldout == [rows] == heldout_files([rows], settings.store_path)
    held = prepare_heldout(settings)
    assert held.samples == report.heldout_rows > 0 and Path(held.store) == settings.heldout_store_path
