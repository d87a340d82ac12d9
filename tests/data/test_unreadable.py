"""Files, stores and servers that break where nobody looks: one line, never a traceback, never a lost answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import template_families as families
from paceline.cli import main
from paceline.config import DataConfig
from paceline.data import prepare as preparing
from paceline.data.chat_template import Renderer
from paceline.data.encoder import Encoder
from paceline.data.loss_mask import samples_of
from paceline.data.prepare import prepare
from paceline.data.rows import Conversation, read_row
from paceline.data.tokenizer import load_tokenizer
from paceline.drafter.anchors import count_eligible
from paceline.errors import DataError
from template_families import Family

ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]}


def run(name: Path, folder: str, store: Path) -> None:
    prepare([str(name)], store, folder, DataConfig(), count_eligible=count_eligible)


@pytest.mark.parametrize(("content", "wanted"), [(" yes", " yes"), ("\n\n  in", "\n\n  in"), ("yes", "yes")])
def test_white_space_after_empty_think_tags_is_kept(
    family_folder: Callable[[Family], str], content: str, wanted: str
) -> None:
    tokenizer = load_tokenizer(family_folder(families.NO_SWITCH))
    row = read_row({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]})
    assert isinstance(row, Conversation)
    (sample,) = samples_of(row, Renderer(tokenizer), Encoder(tokenizer, [" a"]))
    ((start, end),) = sample.spans.reshape(-1, 2).tolist()
    learned = str(tokenizer.decode(sample.ids[start:end].tolist(), skip_special_tokens=False))
    assert "think" not in learned
    assert learned.endswith(f"{wanted.lstrip()}<|im_end|>")


def damaged_pages(file: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{**ROW, "id": str(number)} for number in range(3000)]), file)
    data = bytearray(file.read_bytes())
    for place in range(50, len(data) // 2):
        data[place] ^= 0x5A
    file.write_bytes(bytes(data))


def impossible_time(file: Path) -> None:
    late = pa.array([2**50], pa.timestamp("ms"))
    pq.write_table(pa.Table.from_pylist([ROW]).append_column("at", late), file)


def not_utf8(file: Path) -> None:
    offsets = pa.array([0, 1], pa.int32()).buffers()[1]
    text = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff")])
    pq.write_table(pa.Table.from_pylist([ROW]).append_column("note", text), file)


@pytest.mark.parametrize(("damage", "column"), [(impossible_time, "at"), (not_utf8, "note")])
def test_rows_of_a_table_that_cannot_be_read_are_set_aside(
    damage: Callable[[Path], None], column: str, chatml: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    damage(file)
    with pytest.raises(DataError, match=rf"of 1 rows none .*rows\.parquet:1 \(column {column}: "):
        run(file, chatml, tmp_path / "store")


@pytest.mark.parametrize("damage", [damaged_pages])
def test_a_table_that_cannot_be_read_is_one_line(damage: Callable[[Path], None], chatml: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    damage(file)
    with pytest.raises(DataError, match=r"rows\.parquet: row 1 and the rows after it cannot be read as parquet"):
        run(file, chatml, tmp_path / "store")


def test_a_folder_named_like_a_data_file_is_no_data_file(chatml: str, tmp_path: Path) -> None:
    (tmp_path / "data" / "inner.jsonl").mkdir(parents=True)
    (tmp_path / "data" / "rows.jsonl").write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    run(tmp_path / "data", chatml, tmp_path / "store")
    assert (tmp_path / "store" / "manifest.json").is_file()


@pytest.mark.parametrize("manifest", [b'{"format": 1}', b"\xff\xfe"])
def test_a_broken_manifest_is_told_in_one_line(manifest: bytes, chatml: str, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").write_bytes(manifest)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"manifest\.json: cannot be read"):
        run(tmp_path / "rows.jsonl", chatml, tmp_path / "store")


def test_a_full_disk_is_told_in_one_line(chatml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(preparing, "_tokenize_all", full)
        with pytest.raises(DataError, match=r"cannot be made: No space left on device.*run the same command"):
            run(tmp_path / "rows.jsonl", chatml, tmp_path / "store")
    run(tmp_path / "rows.jsonl", chatml, tmp_path / "store")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("regenerate rows.jsonl --out a.jsonl --target t --local --temperature nan", "--temperature is nan"),
        ("regenerate rows.jsonl --out a.jsonl --target t --local --top-p 2", "--top-p is 2.0"),
        ("regenerate rows.jsonl --out a.jsonl --target t --local --max-new-tokens 0", "--max-new-tokens is 0"),
        ("regenerate rows.jsonl --out a.jsonl --target t --local --batch-size 0", "--batch-size is 0"),
        ("regenerate rows.jsonl --out a.jsonl --target t --local --timeout-s 0", "--timeout-s is 0.0"),
        ("prepare run.yaml --on-policy -1", "--on-policy is -1"),
        ("prepare run.yaml --show -1", "--show is -1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_before_any_work(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_file_that_changes_while_it_is_read_makes_no_store(chatml: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n", encoding="utf-8")

    def rewrite(stage: str, done: int, _: int) -> None:
        if stage == "tokenizing" and done == 0:
            file.write_text(json.dumps(ROW).replace("Hello", "Other") + "\n\n", encoding="utf-8")

    with pytest.raises(DataError, match=r"rows\.jsonl: changed while it was read"):
        prepare([str(file)], tmp_path / "s", chatml, DataConfig(), count_eligible=count_eligible, progress=rewrite)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".s.lock", "rows.jsonl"]
