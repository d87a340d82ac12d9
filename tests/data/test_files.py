"""Names and the files that they mean: compressed, at an address, of several shapes of JSON."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from paceline.data.files import find_files
from paceline.data.readers import read_rows
from paceline.errors import DataError

ROWS = [{"text": f"row {n}", "more": {"é": [n, None]}} for n in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache is a folder of the test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def rows_of(*names: object) -> list[Any]:
    return [row for _, row in read_rows([str(name) for name in names], "data.train")]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl", "rows"])
def test_compressed_files_are_read_whatever_their_suffix(
    compress: Callable[[bytes], bytes], name: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(compress(LINES))
    assert rows_of(file) == ROWS
    (place, _), *_ = read_rows([str(file)], "data.train")
    assert place == f"{file}:1"
    file.write_bytes(compress(LINES * 2))
    assert rows_of(file) == ROWS * 2


def test_a_damaged_compressed_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rows.gz").write_bytes(gzip.compress(LINES * 100)[:-20])
    with pytest.raises(DataError, match=r"rows\.gz: cannot be read: Compressed file ended"):
        rows_of(tmp_path / "rows.gz")
    assert not list((tmp_path / "cache").rglob("rows*"))


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        "\ufeff  [" + ",\n".join(map(json.dumps, ROWS)) + "]\n\n",
        "\n".join(json.dumps(row, indent=1) for row in ROWS),
        LINES.decode(),
    ],
)
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows"])
def test_json_is_read_as_array_as_lines_and_over_lines(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert rows_of(tmp_path / name) == ROWS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[\n{"a": 1},\n{"a": 2]\n', r"the value that begins in line 3 is not JSON: Expecting ',' delimiter"),
        ("[" * 100_000 + "]" * 100_000, "the value that begins in line 1 is not JSON: nested too deeply"),
    ],
)
def test_an_array_that_is_not_json_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=said) as error:
        rows_of(tmp_path / "rows.json")
    assert "\n" not in str(error.value)


def test_lines_whose_first_value_is_a_list_stay_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'["odd"]\n' + LINES)
    assert rows_of(tmp_path / "rows.jsonl") == [["odd"], *ROWS]


def test_files_at_an_address_are_fetched_once(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    for name in ("a.jsonl", "b.jsonl.gz", "c.txt"):
        system.pipe(f"/bucket/{name}", gzip.compress(LINES) if name.endswith(".gz") else LINES)
    assert rows_of("memory://bucket/a.jsonl") == ROWS
    assert rows_of("memory://bucket") == ROWS * 2 == rows_of("memory://bucket/*.jsonl*")
    (first, second) = find_files(["memory://bucket#tag=far&weight=2"])
    assert (first.name, first.weight, first.tags) == ("memory:///bucket/a.jsonl", 2.0, ("far",))
    assert second.name == "memory:///bucket/b.jsonl.gz" and second.path.name == "b.jsonl"
    copied = first.path.stat().st_mtime_ns
    assert find_files(["memory://bucket/a.jsonl"])[0].path.stat().st_mtime_ns == copied
    system.pipe("/bucket/a.jsonl", LINES * 3)
    assert rows_of("memory://bucket/a.jsonl") == ROWS * 3
    (tmp_path / "here.jsonl").write_bytes(LINES)
    assert rows_of(f"file://{tmp_path / 'here.jsonl'}") == ROWS


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("memory://nowhere/rows.jsonl", "cannot be read: "),
        ("memory://nowhere/*.jsonl", r"no \.jsonl, \.parquet or \.arrow file there"),
        ("nosuch://bucket/rows.jsonl", "cannot be opened: Protocol not known: nosuch"),
    ],
)
def test_an_address_that_cannot_be_read_is_one_line(address: str, said: str) -> None:
    with pytest.raises(DataError, match=said) as error:
        find_files([address])
    assert "\n" not in str(error.value) and str(error.value).startswith(f"data.train: {address}: ")
