"""Lengths from every kind of file, and one clear line for each that holds none."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.errors import PlanError
from paceline.plan.lengths_file import read_lengths

LENGTHS = [5, 70, 8, 4096]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_every_format_gives_the_same_lengths(tmp_path):
    np.save(tmp_path / "a.npy", np.array(LENGTHS, np.uint16))
    np.savez(tmp_path / "b.npz", other=np.zeros(2), lengths=np.array(LENGTHS))
    np.savez(tmp_path / "c.npz", mine=np.array(LENGTHS, np.float64))
    write(tmp_path / "d.txt", "# tokens\n5\n70\n\n8\n4096\n")
    write(tmp_path / "e.jsonl", "\n".join(json.dumps({"length": length}) for length in LENGTHS))
    write(tmp_path / "f.jsonl", "\n".join(json.dumps({"input_ids": [1] * length}) for length in LENGTHS))
    write(tmp_path / "g.ndjson", "\n".join(map(str, LENGTHS)))
    pq.write_table(pa.table({"x": ["a"] * 4, "num_tokens": LENGTHS}), tmp_path / "h.parquet")
    pq.write_table(pa.table({"input_ids": [[1] * length for length in LENGTHS]}), tmp_path / "i.parquet")
    saved = datasets.Dataset.from_dict({"input_ids": [[1] * length for length in [9, *LENGTHS]]})
    saved.select(range(1, 5)).save_to_disk(str(tmp_path / "j"))
    with pa.OSFile(str(tmp_path / "k.arrow"), "wb") as sink:
        table = pa.table({"length": LENGTHS})
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    for path in sorted(tmp_path.iterdir()):
        read = read_lengths(path)
        assert read.lengths.tolist() == LENGTHS, path
        assert read.eligible is None
        assert read.groups is None


def test_named_columns_eligible_counts_and_groups(tmp_path):
    rows = [{"n": length, "length": 1, "eligible": length // 2, "tag": "ab"[length % 2]} for length in LENGTHS]
    jsonl = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    np.savez(tmp_path / "c.npz", **{key: np.array([row[key] for row in rows]) for key in rows[0]})
    for path in (jsonl, tmp_path / "b.parquet", tmp_path / "c.npz"):
        read = read_lengths(path, "n", "tag")
        assert read.lengths.tolist() == LENGTHS
        assert read.eligible.tolist() == [2, 35, 4, 2048]
        assert [read.groups.names[code] for code in read.groups.codes] == ["b", "a", "a", "a"]


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.txt", "5\nabc\n7", ["a.txt:2: abc is not a length"]),
        ("a.txt", "5\n0\n-3\n2.5", ["a.txt:2: 0 is not a", "a.txt:3: -3 is not a", "a.txt:4: 2.5 is not"]),
        ("a.txt", "\n# nothing\n", ["a.txt: lengths: empty"]),
        ("a.jsonl", '{"length": 3}\n{"length": null}', ["a.jsonl:2: null is not a length"]),
        ("a.jsonl", '{"length": 3}\n{"length": true}', ["a.jsonl:2: true is not a length"]),
        ("a.jsonl", '{"length": 3}\n{"length"', ["a.jsonl:2: not valid JSON"]),
        ("a.jsonl", '{"text": "x"}', ["a.jsonl:1: has no column length; it has text"]),
        ("a.jsonl", '{"length": 3, "eligible": 1}\n{"length": 3}', ["1 of 2 rows have `eligible`"]),
        ("a.npy", "hello", ["a.npy: cannot be read as .npy"]),
        ("a.parquet", "hello", ["a.parquet: cannot be read as .parquet"]),
    ],
)
def test_bad_files_are_refused_line_by_line(tmp_path, name, text, lines):
    with pytest.raises(PlanError) as caught:
        read_lengths(write(tmp_path / name, text))
    for line in lines:
        assert line.removeprefix("a.") in str(caught.value)
    assert all("\n" not in error for error in caught.value.errors)


def test_many_bad_lines_are_summed_up(tmp_path):
    with pytest.raises(PlanError) as caught:
        read_lengths(write(tmp_path / "a.txt", "x\n" * 500))
    assert len(caught.value.errors) == 6
    assert caught.value.errors[-1] == "... and 495 more such lines"


def test_missing_columns_and_files_are_named(tmp_path):
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp_path / "a.parquet")
    with pytest.raises(PlanError, match="which column holds the lengths"):
        read_lengths(tmp_path / "a.parquet")
    with pytest.raises(PlanError, match="has no column z; it has x, y"):
        read_lengths(tmp_path / "a.parquet", "z")
    pq.write_table(pa.table({"length": pa.array([4, None, 5])}), tmp_path / "b.parquet")
    with pytest.raises(PlanError, match=r"length\[1\] is missing"):
        read_lengths(tmp_path / "b.parquet")
    with pytest.raises(PlanError, match="no such file"):
        read_lengths(tmp_path / "none.npy")
    np.save(tmp_path / "c.npy", np.array([4]))
    with pytest.raises(PlanError, match="has no columns"):
        read_lengths(tmp_path / "c.npy", "x")
    np.save(tmp_path / "d.npy", np.array([4.0, np.nan]))
    with pytest.raises(PlanError, match=r"d.npy: lengths: float64 numbers"):
        read_lengths(tmp_path / "d.npy")


def test_broken_arrays_and_numbers_out_of_range_are_one_line(tmp_path):
    np.save(tmp_path / "scalar.npy", np.array(5))
    np.savez(tmp_path / "scalar.npz", np.array(5))
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 no archive")
    np.save(tmp_path / "long.npy", np.array([5, 2**31]))
    np.save(tmp_path / "float.npy", np.array([5.0, 1e30]))
    write(tmp_path / "long.txt", f"5\n{2**63}")
    write(tmp_path / "long.jsonl", f'{{"length": {2**63}}}')
    np.savez(tmp_path / "eligible.npz", lengths=np.array([5, 6, 7]), eligible=np.array([5, 7, 0]))
    for name, words in (
        ("scalar.npy", r"lengths: int64 numbers of shape \(\)"),
        ("scalar.npz", r"lengths: int64 numbers of shape \(\)"),
        ("broken.npz", "cannot be read as .npz"),
        ("long.npy", r"lengths\[1\] is 2147483648; allowed: 1 to 2147483647"),
        ("float.npy", "float.npy: lengths: float64 numbers"),
        ("long.txt", "long.txt:2: 9223372036854775808 is not a length"),
        ("long.jsonl", "long.jsonl:1: 9223372036854775808 is not a length"),
        ("eligible.npz", r"eligible\[1\] is 7, but the sample has 6 tokens"),
    ):
        with pytest.raises(PlanError, match=words) as told:
            read_lengths(tmp_path / name)
        assert "\n" not in str(told.value)


def test_headers_byte_order_marks_and_unknown_groups(tmp_path):
    write(tmp_path / "bom.txt", "\ufeff5\n6\n")
    assert read_lengths(tmp_path / "bom.txt").lengths.tolist() == [5, 6]
    with pytest.raises(PlanError, match=r"a.txt:1: tokens is not a length; .* \(a header line begins with #\)"):
        read_lengths(write(tmp_path / "a.txt", "tokens\n5\n6\n"))
    rows = write(tmp_path / "a.jsonl", '{"length": 5, "tag": "a"}\n')
    with pytest.raises(PlanError, match=r"a.jsonl:1: has no column nope; it has length, tag"):
        read_lengths(rows, group="nope")
