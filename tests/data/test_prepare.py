"""Files in, store out: what is kept, what is set aside and why, what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import template_families as families
from paceline.config import DataConfig
from paceline.data.prepare import check_store, prepare
from paceline.data.report import NOTES, REASONS, PrepareReport
from paceline.data.store import open_store
from paceline.data.tokenizer import load_tokenizer
from paceline.drafter.anchors import count_eligible
from paceline.errors import DataError

Write = Callable[..., str]


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def run(files: str | list[str], store: Path, tokenizer: str, **settings: Any) -> PrepareReport:
    names = [files] if isinstance(files, str) else files
    replace = settings.pop("replace", False)
    return prepare(names, store, tokenizer, DataConfig(**settings), count_eligible=count_eligible, replace=replace)


CHATS = [chat(f"question {n}", f"The answer to it is {n * n}.") for n in range(20)]


def test_rows_come_back_as_their_rendered_tokens_and_masks(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    report = run(write_rows(CHATS), tmp_path / "store", chatml)
    store = open_store(tmp_path / "store")
    tokenizer = load_tokenizer(chatml)
    assert (report.rows_in, report.rows_used, report.samples, len(store)) == (20, 20, 20, 20)
    for row, (ids, mask) in enumerate(store.read(range(20))):
        prompt = f"<|im_start|>user\nquestion {row}<|im_end|>\n<|im_start|>assistant\n"
        answer = f"The answer to it is {row * row}.<|im_end|>"
        border = len(tokenizer.encode(prompt))
        assert ids.dtype == np.int64 and mask.dtype == np.bool_
        assert tokenizer.decode(ids) == prompt + answer
        assert mask.tolist() == [False] * border + [True] * (len(ids) - border)
        assert store.lengths[row] == len(ids)
        assert store.eligible[row] == sum(a and b for a, b in itertools.pairwise(mask))
        assert store.origin(row).endswith(f"rows.jsonl:{row + 1}")
    assert report.tokens == store.lengths.sum()
    assert report.supervised_tokens == store.supervised.sum() == sum(mask.sum() for _, mask in store.read(range(20)))
    assert report.eligible_anchors == store.eligible.sum()
    assert sum(count for _, count, _ in report.length_histogram) == 20
    assert sum(tokens for *_, tokens in report.length_histogram) == report.tokens
    assert all(tokens <= upper * count for upper, count, tokens in report.length_histogram)


def test_rows_are_read_in_the_order_asked_for(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    run(write_rows(CHATS), tmp_path / "store", chatml)
    store = open_store(tmp_path / "store")
    one_by_one = [store.read([row])[0] for row in range(20)]
    order = [7, 3, 3, 19, 0]
    for (ids, mask), row in zip(store.read(np.array(order)), order, strict=True):
        assert np.array_equal(ids, one_by_one[row][0]) and np.array_equal(mask, one_by_one[row][1])
    with pytest.raises(DataError, match="rows -1 to 20 asked of 20"):
        store.read([-1, 20])


BAD = {
    "invalid_json": '{"messages": [',
    "no_messages": {"question": "a", "note": 1},
    "wrong_roles": {"messages": [{"role": "wizard", "content": "a"}]},
    "no_assistant": {"messages": [{"role": "user", "content": "a"}]},
    "not_text": {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}]},
    "empty_text": {"text": " "},
    "bad_tokens": {"input_ids": [1, 2, 3], "loss_mask": [0, 1]},
    "end_token_inside": chat("a", "b<|im_end|>c"),
    "cut_answer": chat("a", "never end", finish_reason="length"),
    "all_supervised": {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]},
    "nothing_supervised": {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]},
    "no_anchor": {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1]},
    "too_long": chat("a", "word " * 200),
    "duplicate": CHATS[0],
}


def test_each_unusable_row_is_counted_with_its_place(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    report = run(write_rows([*CHATS, *BAD.values()]), tmp_path / "store", chatml, max_length=128)
    assert report.rows_in == 20 + len(BAD) and report.rows_used == report.samples == 20
    assert {reason: count.count for reason, count in report.set_aside.items()} == dict.fromkeys(BAD, 1)
    for place, reason in enumerate(BAD):
        assert report.set_aside[reason].example.endswith(f"rows.jsonl:{21 + place}"), reason
    assert set(report.set_aside) <= set(REASONS) and set(report.notes) <= set(NOTES)
    assert any("rows (41%) are not used" in warning for warning in report.warnings)


@pytest.mark.parametrize("reason", BAD)
def test_nothing_left_is_an_error_that_names_reason_and_place(
    reason: str, tmp_path: Path, chatml: str, write_rows: Write
) -> None:
    if reason == "duplicate":
        return
    with pytest.raises(DataError) as error:
        run(write_rows([BAD[reason]]), tmp_path / "store", chatml, max_length=128)
    assert len(error.value.errors) == 1 and "\n" not in str(error.value)
    assert f"of 1 rows none can be trained on: 1 × {REASONS[reason]}, for example " in str(error.value)
    assert "rows.jsonl:1" in str(error.value)
    assert not (tmp_path / "store").exists()


def test_files_and_folders_that_cannot_be_used_are_one_line_each(
    tmp_path: Path, chatml: str, write_rows: Write
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "data.csv").write_text("a", encoding="utf-8")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    good = write_rows(CHATS)
    with pytest.raises(DataError) as error:
        run(
            [str(tmp_path / name) for name in ("empty.jsonl", "missing.jsonl", "blanks.jsonl", "folder", "data.csv")],
            tmp_path / "s",
            chatml,
        )
    assert [line.rsplit(": ", 1)[1].split(";")[0] for line in error.value.errors] == [
        "the file is empty",
        f"no such file (looked at {tmp_path / 'missing.jsonl'})",
        f"no such file (looked at {tmp_path / 'blanks.jsonl'})",
        "no .jsonl, .parquet or .arrow file in this folder",
        "unknown kind of file",
    ]
    assert error.value.errors[2].endswith("; did you mean blank.jsonl?")
    for files, tokenizer, words in (
        ([], chatml, "data.train: no files given"),
        ([str(tmp_path / "blank.jsonl")], chatml, "the data files hold no rows"),
        ([str(tmp_path / "broken.parquet")], chatml, "broken.parquet: cannot be read as parquet"),
        ([good], str(tmp_path / "folder"), "folder: no tokenizer in this folder"),
        ([good], str(tmp_path / "nowhere"), "nowhere: no such folder"),
    ):
        with pytest.raises(DataError, match=words.replace(".", r"\.")) as error:
            run(files, tmp_path / "s", tokenizer)
        assert len(error.value.errors) == 1 and "\n" not in str(error.value)


def test_chats_need_a_chat_template_and_text_does_not(
    tmp_path: Path, chatml: str, family_folder: Callable[[families.Family], str], write_rows: Write
) -> None:
    bare = tmp_path / "bare"
    tokenizer = load_tokenizer(chatml)
    bare.mkdir()
    tokenizer.backend_tokenizer.save(str(bare / "tokenizer.json"))
    (bare / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}), encoding="utf-8"
    )
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        run(write_rows(CHATS), tmp_path / "s", str(bare))
    report = run(write_rows([{"text": "Hello there, how are you?"}]), tmp_path / "s", str(bare))
    assert report.notes["plain_text"].count == 1
    assert report.samples == 1 and report.supervised_tokens == report.tokens


def test_too_long_is_dropped_or_cut_with_what_is_lost(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    long = chat("Hi", "word " * 60)
    hidden = chat("word " * 60, "Hi there")
    files = write_rows([*CHATS[:2], long, hidden])
    dropped = run(files, tmp_path / "dropped", chatml, max_length=64)
    assert dropped.samples == 2 and dropped.set_aside["too_long"].count == 2
    cut = run(files, tmp_path / "cut", chatml, max_length=64, on_too_long="cut")
    whole = run(files, tmp_path / "whole", chatml, max_length=4096)
    assert cut.samples == 3 and cut.notes["cut"].count == 1 and cut.set_aside["too_long_after_cut"].count == 1
    ids, mask = open_store(tmp_path / "cut").read([2])[0]
    full_ids, full_mask = open_store(tmp_path / "whole").read([2])[0]
    assert len(ids) == 64 and np.array_equal(ids, full_ids[:64]) and np.array_equal(mask, full_mask[:64])
    assert cut.notes["cut"].lost == full_mask[64:].sum() > 0
    assert whole.lost_supervised_tokens == 0
    assert any("lost" in warning for warning in cut.warnings)


def test_cut_answers_are_kept_without_their_end_when_asked(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    files = write_rows([chat("Hi", "The answer is 4.", finish_reason="length"), CHATS[0]])
    report = run(files, tmp_path / "store", chatml, on_cut_answer="keep")
    ids, mask = open_store(tmp_path / "store").read([0])[0]
    text = load_tokenizer(chatml).decode(ids)
    assert text.endswith("The answer is 4.") and mask[-1] and report.notes["cut_answer"].count == 1


def test_same_data_is_prepared_once_and_other_data_is_refused(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    store = tmp_path / "store"
    first = run(write_rows(CHATS), store, chatml)
    before = {file.name: file.stat().st_mtime_ns for file in store.iterdir()}
    again = run(write_rows(CHATS, "copy.jsonl"), store, chatml, workers=2)
    assert again.reused and not first.reused and again.fingerprint == first.fingerprint
    assert {file.name: file.stat().st_mtime_ns for file in store.iterdir()} == before
    for changed, words in (({"max_length": 99}, "data.max_length 4096 there, 99 asked"), ({}, "another data")):
        with pytest.raises(DataError, match=words):
            run(write_rows(CHATS[: None if changed else 5]), store, chatml, **changed)
    replaced = run(write_rows(CHATS[:5]), store, chatml, replace=True)
    assert replaced.samples == len(open_store(store)) == 5
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [".store.lock"]


def test_a_store_of_another_target_is_refused_with_what_differs(
    tmp_path: Path, chatml: str, family_folder: Callable[[families.Family], str], write_rows: Write
) -> None:
    run(write_rows(CHATS), tmp_path / "store", chatml)
    check_store(tmp_path / "store", chatml, DataConfig())
    with pytest.raises(DataError, match="another tokenizer; another chat template"):
        check_store(tmp_path / "store", family_folder(families.HEADERS), DataConfig())
    with pytest.raises(DataError, match="another chat template"):
        check_store(tmp_path / "store", family_folder(families.TAGGED), DataConfig())
    with pytest.raises(DataError, match=r"data\.thinking auto there, off asked"):
        check_store(tmp_path / "store", chatml, DataConfig(thinking="off"))


def test_what_is_no_store_is_refused(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    with pytest.raises(DataError, match="no tokenized store here; run `paceline prepare` first"):
        open_store(tmp_path / "nothing")
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    with pytest.raises(DataError, match="is there and is not a store"):
        run(write_rows(CHATS), other, chatml)
    run(write_rows(CHATS), tmp_path / "store", chatml)
    (tmp_path / "store" / "index.arrow").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"index\.arrow: cannot be read"):
        open_store(tmp_path / "store")


def test_duplicates_are_found_exactly_and_nearly(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    long = " ".join(f"word{n}" for n in range(80))
    rows = [chat("Q", long), chat("other question", "x y z"), chat("Q", long + " end"), chat("Q", long)]
    kept = run(write_rows(rows), tmp_path / "kept", chatml)
    assert kept.samples == 3 and kept.set_aside["duplicate"].example.endswith(":4")
    assert kept.notes["near_duplicate"].count == 1 and kept.notes["near_duplicate"].example.endswith(":3")
    assert kept.notes["near_duplicate"].detail.endswith("rows.jsonl:1")
    dropped = run(write_rows(rows), tmp_path / "dropped", chatml, near_duplicates="drop")
    assert dropped.samples == 2 and dropped.set_aside["near_duplicate"].count == 1
    all_kept = run(write_rows(rows), tmp_path / "all", chatml, duplicates="keep")
    assert all_kept.samples == 4


def test_rows_that_ask_what_is_held_out_are_left_out(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    heldout = write_rows(
        [{"messages": [{"role": "user", "content": "QUESTION  3"}]}, {"prompt": "question 4"}], "h.jsonl"
    )
    longer = {"messages": [*CHATS[4]["messages"], {"role": "user", "content": "and?"}, CHATS[5]["messages"][1]]}
    report = run(write_rows([*CHATS, longer]), tmp_path / "store", chatml, heldout=[heldout])
    assert report.samples == 18 and report.set_aside["heldout"].count == 3
    assert report.set_aside["heldout"].example.endswith("rows.jsonl:4")
    assert any("held-out" in warning for warning in report.warnings)


def contents(store: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in store.iterdir() if file.suffix == ".arrow"}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are cut into pieces of half a kilobyte."""
    monkeypatch.setattr("paceline.data.readers._SMALLEST_SHARD", 500)


@pytest.mark.usefixtures("small_pieces")
def test_rows_of_many_pieces_keep_their_order_and_lines(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    report = run(write_rows([*CHATS, *BAD.values()]), tmp_path / "store", chatml, max_length=128)
    store = open_store(tmp_path / "store")
    assert len(contents(tmp_path / "store")) > 4
    assert [store.origin(row).rsplit(":", 1)[1] for row in range(20)] == [str(line) for line in range(1, 21)]
    assert [f"question {row}<" in load_tokenizer(chatml).decode(store.read([row])[0][0]) for row in range(20)]
    for place, reason in enumerate(BAD):
        assert report.set_aside[reason].example.endswith(f"rows.jsonl:{21 + place}"), reason


@pytest.mark.usefixtures("small_pieces")
def test_the_store_does_not_depend_on_the_number_of_workers(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    files = write_rows([*CHATS, *BAD.values()])
    one = run(files, tmp_path / "one", chatml, max_length=128)
    two = run(files, tmp_path / "two", chatml, max_length=128, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert replace(one, store="") == replace(two, store="")


@pytest.mark.usefixtures("small_pieces")
def test_a_run_that_was_ended_goes_on_where_it_stopped(
    tmp_path: Path, chatml: str, write_rows: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paceline.data.prepare as module

    files = write_rows([*CHATS, *BAD.values()])
    one = run(files, tmp_path / "one", chatml, max_length=128)
    done: list[int] = []
    tokenize = module.tokenize_shard

    def dies_at_third(piece: Any) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        tokenize(piece)
        done.append(piece.number)

    def counts(piece: Any) -> None:
        tokenize(piece)
        seen.append(piece.number)

    monkeypatch.setattr(module, "tokenize_shard", dies_at_third)
    with pytest.raises(KeyboardInterrupt):
        run(files, tmp_path / "three", chatml, max_length=128)
    assert not (tmp_path / "three").exists()
    seen: list[int] = []
    monkeypatch.setattr(module, "tokenize_shard", counts)
    three = run(files, tmp_path / "three", chatml, max_length=128)
    assert seen and not set(seen) & {0, 1}
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    assert replace(one, store="") == replace(three, store="")


def test_forms_of_rows_give_the_same_tokens(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    question, answer = "Hello there", "I am fine."
    forms = [
        chat(question, answer),
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]},
        {"prompt": question, "response": answer},
        {"prompt": [{"role": "user", "content": question}], "completion": [{"role": "assistant", "content": answer}]},
    ]
    run(write_rows(forms), tmp_path / "store", chatml, duplicates="keep")
    store = open_store(tmp_path / "store")
    rows = store.read(range(4))
    assert len(store) == 4
    assert all(np.array_equal(rows[0][k], other[k]) for other in rows[1:] for k in (0, 1))
    ready = {"input_ids": rows[0][0].tolist(), "loss_mask": rows[0][1].astype(int).tolist(), "tags": ["x"]}
    run(write_rows([ready]), tmp_path / "ready", chatml)
    again = open_store(tmp_path / "ready")
    assert np.array_equal(again.read([0])[0][0], rows[0][0]) and np.array_equal(again.read([0])[0][1], rows[0][1])
    assert again.tags(0) == ("x",)


def test_parquet_arrow_and_dataset_folders_give_what_jsonl_gives(
    tmp_path: Path, chatml: str, write_rows: Write
) -> None:
    from datasets import Dataset

    table = pa.Table.from_pylist(CHATS)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=6)
    Dataset.from_list(CHATS).save_to_disk(tmp_path / "folder", num_shards=2)
    run(write_rows(CHATS), tmp_path / "jsonl", chatml)
    wanted = open_store(tmp_path / "jsonl").read(range(20))
    for name in ("rows.parquet", "rows.arrow", "folder"):
        report = run(str(tmp_path / name), tmp_path / f"store-{name}", chatml)
        found = open_store(tmp_path / f"store-{name}").read(range(20))
        assert report.samples == 20
        assert all(np.array_equal(a[k], b[k]) for a, b in zip(wanted, found, strict=True) for k in (0, 1)), name


def test_tags_of_rows_and_of_what_is_seen_in_them_are_totalled(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    rows = [
        chat("Hi", "Hello there.", tags=["greeting", "short"]),
        chat("你好", "你好，我很好。", tag="greeting"),
        {"messages": [{"role": "system", "content": "s"}, *CHATS[0]["messages"], *CHATS[1]["messages"]]},
    ]
    report = run(write_rows(rows), tmp_path / "store", chatml)
    store = open_store(tmp_path / "store")
    assert store.tags(0) == ("greeting", "short", "no-thinking", "script:latin")
    assert store.tags(1) == ("greeting", "no-thinking", "script:chinese")
    assert store.tags(2) == ("no-thinking", "system", "multi-turn", "script:latin")
    assert report.tags["greeting"].samples == 2
    assert report.tags["greeting"].supervised_tokens == store.supervised[:2].sum()
    assert report.tags["no-thinking"].tokens == report.tokens


def test_files_have_weights_and_tags(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    often, rare = write_rows(CHATS[:8], "often.jsonl"), write_rows(CHATS[8:], "rare.jsonl")
    report = run([f"{often}#tag=code&weight=2.5", f"{rare}#weight=0.5&tag=chat&tag=small"], tmp_path / "store", chatml)
    store = open_store(tmp_path / "store")
    lines = [store.origin(row) for row in range(len(store))]
    times = [sum(line == f"{often}:{k}" for line in lines) for k in range(1, 9)]
    assert set(times) <= {2, 3} and 16 < sum(times) < 24
    kept = [line for line in lines if line.startswith(rare)]
    assert len(set(kept)) == len(kept) and 0 < len(kept) < 12
    assert report.set_aside["weight"].count == 12 - len(kept)
    assert store.tags(0)[0] == "code" and store.tags(len(store) - 1)[:2] == ("chat", "small")
    assert report.samples == len(store) == report.tags["code"].samples + report.tags["chat"].samples
    with pytest.raises(DataError, match="another data"):
        run([f"{often}#tag=code&weight=2", f"{rare}#weight=0.5&tag=chat&tag=small"], tmp_path / "store", chatml)
    for bad, words in (
        ("weight=no", "weight is 'no'"),
        ("weight=0", "weight is '0'"),
        ("size=1", "'size=1' is not an option"),
    ):
        with pytest.raises(DataError, match=words):
            run([f"{often}#{bad}"], tmp_path / "other", chatml)


def test_data_sets_are_loaded_as_datasets_loads_them(
    tmp_path: Path, chatml: str, write_rows: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    for split, rows in (("train", CHATS[:15]), ("test", CHATS[15:])):
        Path(write_rows(rows, f"{split}.jsonl")).rename(tmp_path / "set" / f"{split}.jsonl")
    report = run([f"hub:{tmp_path / 'set'}"], tmp_path / "store", chatml)
    test = run([f"hub:{tmp_path / 'set'}#split=test"], tmp_path / "test", chatml)
    assert (report.samples, test.samples) == (15, 5)
    with pytest.raises(DataError, match="nowhere: cannot be loaded"):
        run([f"hub:{tmp_path / 'nowhere'}"], tmp_path / "other", chatml)


def test_a_template_that_writes_the_date_is_told(
    tmp_path: Path, family_folder: Callable[[families.Family], str], write_rows: Write
) -> None:
    report = run(write_rows(CHATS), tmp_path / "store", family_folder(families.DATED))
    assert report.notes["dated"].count == 20
    assert any("date" in warning for warning in report.warnings)


def test_modes_that_are_rare_are_told(
    tmp_path: Path, family_folder: Callable[[families.Family], str], write_rows: Write
) -> None:
    thinks = {"role": "assistant", "content": "4", "reasoning_content": "add"}
    rows = [chat(f"question {n}", "word " * 50 + str(n)) for n in range(20)]
    rows.append({"messages": [{"role": "user", "content": "2 + 2?"}, thinks]})
    report = run(write_rows(rows), tmp_path / "store", family_folder(families.THINKING))
    assert any(warning.startswith("only ") and "thinking" in warning for warning in report.warnings)


def test_a_link_in_place_of_the_stores_lock_is_refused(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / ".store.lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(DataError, match=r"store\.lock: cannot be made or locked .*it is a link to .*theirs") as error:
        run([write_rows([chat("Hi", "Hello.")])], tmp_path / "store", chatml)
    assert len(error.value.errors) == 1 and (tmp_path / "theirs").read_text() == "precious"
