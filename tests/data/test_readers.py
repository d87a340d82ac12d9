"""Rows of every kind of file against the same rows as JSON lines; odd values among good ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import template_families as families
from paceline.config import DataConfig
from paceline.data.prepare import prepare
from paceline.data.readers import read_rows
from paceline.data.rows import RowRejected
from paceline.data.store import open_store
from paceline.data.tokenizer import load_tokenizer
from paceline.drafter.anchors import count_eligible


def rows_of(*names: object) -> list[Any]:
    return [row for _, row in read_rows([str(name) for name in names], "data.train")]


def called(name: str, arguments: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    tool = {"type": "function", "function": {"name": name, "parameters": {"properties": parameters}}}
    turns = [{"role": "user", "content": f"{name}?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"messages": turns, "tools": [tool]}


ROWS = [
    called("add", {"a": 1}, {"a": {"type": "int"}}),
    called("say", {"b": {"x": None, "y": [1, "a", {"z": None}]}}, {"b": {"type": ["int", "null"]}}),
    called("ask", {"a": "text", "b": [None, 2.5]}, {}),
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]},
]


@pytest.fixture
def mixed(tmp_path: Path, write_rows: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Rows whose nested types differ, written by `datasets` in three ways, beside their JSON lines."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    lines = write_rows(ROWS)
    loaded = datasets.load_dataset("json", data_files=lines, split="train", cache_dir=str(tmp_path / "cache"))
    assert "Json" in str(loaded.features), "such rows are what this is about"
    loaded.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "hub").mkdir()
    loaded.to_parquet(str(tmp_path / "hub" / "train.parquet"))
    return {
        "lines": lines,
        "saved": str(tmp_path / "saved"),
        "parquet": str(tmp_path / "hub" / "train.parquet"),
        "hub": f"hub:{tmp_path / 'hub'}",
    }


@pytest.mark.parametrize("way", ["saved", "parquet", "hub"])
def test_json_columns_give_the_rows_of_the_lines(
    way: str, mixed: dict[str, str], tmp_path: Path, family_folder: Callable[[families.Family], str]
) -> None:
    assert rows_of(mixed[way]) == ROWS
    folder = family_folder(families.TOOLS)
    texts = []
    for name in ("lines", way):
        store = tmp_path / f"store of {name}"
        prepare([mixed[name]], store, folder, DataConfig(), count_eligible=count_eligible)
        opened, tokenizer = open_store(store), load_tokenizer(folder)
        texts.append([tokenizer.decode(ids) for ids, _ in opened.read(range(len(opened)))])
    assert texts[0] == texts[1] and len(texts[0]) == 4 and "null" in texts[0][1]


def test_json_text_is_decoded_at_every_depth(tmp_path: Path) -> None:
    text = pa.array(['{"a": null}', '{"a": ', None, "[1]"], pa.string()).cast(pa.string())
    column = pa.ExtensionArray.from_storage(pa.json_(), text)
    nested = pa.StructArray.from_arrays([column], ["inside"])
    listed = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4], pa.int32()), nested)
    pq.write_table(pa.table({"text": ["w", "x", "y", "z"], "deep": listed}), tmp_path / "rows.parquet")
    first, broken, empty, last = rows_of(tmp_path / "rows.parquet")
    assert first == {"text": "w", "deep": [{"inside": {"a": None}}]}
    assert isinstance(broken, RowRejected) and broken.reason == "invalid_json"
    assert empty == {"text": "y", "deep": [{}]} and last == {"text": "z", "deep": [{"inside": [1]}]}


def test_odd_lines_cost_their_rows_alone(tmp_path: Path) -> None:
    lines = [
        '{"a": NaN, "b": [Infinity, -Infinity, 1e999]}',
        '{"text": "NaN is a word", "a": NaN}',
        '{"a": "\\ud800", "b": NaN}',
        '{"a": NaN,',
        "[" * 5000 + "]" * 5000,
        '{"a": NaN, "b": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"a": 1}',
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    first, word, *odd, last = rows_of(tmp_path / "rows.jsonl")
    assert first == {"a": None, "b": [None, None, None]} and last == {"a": 1}
    assert word == {"text": "NaN is a word", "a": None}
    assert [row.reason for row in odd] == ["invalid_json"] * 4
    assert "nested too deeply" in odd[-1].detail


def test_one_unreadable_value_costs_its_row_alone(tmp_path: Path) -> None:
    at = pa.array([0, 2**50, 0], pa.timestamp("ms"))
    pq.write_table(pa.table({"text": ["a", "b", "c"], "at": at}), tmp_path / "rows.parquet")
    first, odd, last = rows_of(tmp_path / "rows.parquet")
    assert (first["text"], last["text"]) == ("a", "c")
    assert odd.reason == "unreadable" and odd.detail.startswith("column at: ")


def test_lines_are_numbered_in_every_kind_of_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.readers._SMALLEST_SHARD", 64)
    monkeypatch.setattr("paceline.data.readers._ROWS", 3)
    rows = [{"text": f"row {n}"} for n in range(1, 30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=2)
    for name in ("rows.jsonl", "rows.parquet"):
        found = list(read_rows([str(tmp_path / name)], "data.train"))
        assert found == [(f"{tmp_path / name}:{n}", {"text": f"row {n}"}) for n in range(1, 30)]
