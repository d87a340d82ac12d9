"""A store is as it was written, or it is refused; disks that fill up while it is made are one line."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from paceline.cli import main
from paceline.config import DataConfig
from paceline.data.prepare import prepare
from paceline.data.store import USED_IDS, open_store, read_manifest
from paceline.drafter.anchors import count_eligible
from paceline.errors import DataError

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": f"The answer to it is {n * n}."},
        ]
    }
    for n in range(60)
]


@pytest.fixture
def store(tmp_path: Path, chatml: str, write_rows: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of several parts."""
    monkeypatch.setattr("paceline.data.readers._SMALLEST_SHARD", 1000)
    prepare([write_rows(CHATS)], tmp_path / "store", chatml, DataConfig(), count_eligible=count_eligible)
    assert len(list((tmp_path / "store").glob("part-*.arrow"))) > 2
    return tmp_path / "store"


def test_every_flipped_bit_is_found_before_a_part_is_used(store: Path) -> None:
    draw = random.Random(0)
    rows = range(len(open_store(store)))
    files = sorted(store.glob("*.arrow"))
    for file in files * 8:
        data = file.read_bytes()
        place = draw.randrange(len(data))
        file.write_bytes(data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :])
        with pytest.raises(DataError, match=rf"{file.name}: (damaged: its bytes are not|cannot be read)") as error:
            open_store(store).read(rows)
        assert "\n" not in str(error.value)
        file.write_bytes(data)
    open_store(store).read(rows)


def test_parts_that_are_not_read_are_not_verified(store: Path) -> None:
    rows = open_store(store).read([0])
    file = sorted(store.glob("part-*.arrow"))[-1]
    file.unlink()
    opened = open_store(store)
    assert np.array_equal(opened.read([0])[0][0], rows[0][0])
    with pytest.raises(DataError, match=rf"{file.name}: cannot be read \(No such file or directory\)"):
        opened.read([len(opened) - 1])


def test_a_part_is_verified_once_and_only_where_asked(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    monkeypatch.setattr("paceline.data.store.file_hash", lambda path: hashed.append(path.name) or "another")
    open_store(store, verify=False).read(range(60))
    assert hashed == []
    monkeypatch.undo()
    opened = open_store(store)
    opened.read(range(60))
    monkeypatch.setattr("paceline.data.store.file_hash", lambda path: hashed.append(path.name) or "another")
    opened.read(range(60))
    assert hashed == []


def test_training_ends_in_one_line_where_the_store_is_damaged(
    store: Path, tmp_path: Path, demo_assets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "run.yaml"
    settings.write_text(
        f"run_dir: {tmp_path / 'run'}\ntarget: {{path: {demo_assets / 'target'}, dtype: float32, num_taps: 2}}\n"
        f"data: {{train: [{demo_assets / 'heldout.jsonl'}], store: {tmp_path / 'demo'}}}\n"
        "plan: {token_budget: 1024}\ndrafter: {num_layers: 1, block_size: 4, dtype: float32}\n"
        "train: {max_steps: 1}\nflow: {mode: inline}\n",
        encoding="utf-8",
    )
    assert main(["prepare", str(settings)]) == 0
    part = tmp_path / "demo" / "part-000000.arrow"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    capsys.readouterr()
    assert main(["train", str(settings)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "part-000000.arrow: damaged: its bytes are not those that were written" in line
    assert main(["train", str(settings), "--data.verify", "false"]) == 0


@contextmanager
def small_files(limit: int) -> Generator[None]:
    """No file of this process may grow beyond `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_is_one_line(
    tmp_path: Path, chatml: str, write_rows: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.readers._SMALLEST_SHARD", 1000)
    rows = write_rows([{**row, "document": n} for n, row in enumerate(CHATS * 3)])
    config, store = DataConfig(heldout_share=0.2, duplicates="keep"), tmp_path / "store"
    stopped_at: set[tuple[str, ...]] = set()
    for limit in range(100, 20_000, 200):
        try:
            with small_files(limit):
                prepare([rows], store, chatml, config, count_eligible=count_eligible)
            break
        except DataError as error:
            assert "File too large; fix that and run the same command" in str(error) and "\n" not in str(error)
        assert not store.exists()
        files = (path for path in tmp_path.rglob("*") if path.is_file() and ".unfinished" in str(path))
        stopped_at.add(tuple(sorted(path.name for path in files)))
    assert set(read_manifest(store).files) > {USED_IDS, "heldout.jsonl"} and len(stopped_at) > 2, stopped_at
