"""What `paceline train` and `paceline prepare` do with the store of a run, and what they say of held-out data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.data.store import open_store

MakeRun = Callable[..., Path]
SHORT = {"train": {"max_steps": 2}, "checkpoint": {"every_steps": 1}}


@pytest.fixture
def own_store(make_run: MakeRun, tmp_path: Path) -> Path:
    """A settings file of a short run whose store is in its run directory."""
    return make_run(data={"store": None, "heldout_share": 0.1}, **SHORT)


def test_the_report_of_prepare_is_printed_once(own_store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(own_store)]) == 0
    out = capfd.readouterr().out
    assert out.count("supervised (") == 1
    assert main(["train", str(own_store), "--train.max-steps", "1"]) == 0
    again = capfd.readouterr().err
    assert "supervised (" not in again and "data     " in again


def test_a_missing_store_of_a_run_is_made_again(own_store: Path, tmp_path: Path, capfd) -> None:
    run_dir = tmp_path / "run"
    assert main(["train", str(own_store), "--train.max-steps", "1"]) == 0
    fingerprint = open_store(run_dir / "store").fingerprint
    for words in (
        ["prepare", str(run_dir)],
        ["train", str(run_dir)],
        ["train", str(own_store), "--train.max-steps", "1"],
    ):
        shutil.rmtree(run_dir / "store")
        shutil.rmtree(run_dir / "store-heldout", ignore_errors=True)
        capfd.readouterr()
        assert main(words) == 0, capfd.readouterr().err
        assert ("made again" in capfd.readouterr().err) == (words[0] == "train")
        assert open_store(run_dir / "store").fingerprint == fingerprint
        assert (run_dir / "store-heldout").is_dir() == (words[0] == "train")


@pytest.mark.parametrize("command", ["prepare", "train"])
def test_a_store_of_other_data_is_not_made(
    command: str, own_store: Path, few_chats: Path, tmp_path: Path, capfd
) -> None:
    run_dir, chats = tmp_path / "run", tmp_path / "chats.jsonl"
    shutil.copy(few_chats, chats)
    flags = ["--train.max-steps", "1", "--data.train", f"[{chats}]"]
    assert main(["train", str(own_store), *flags]) == 0
    shutil.rmtree(run_dir / "store")
    chats.write_text("".join(chats.read_text().splitlines(keepends=True)[1:]))
    capfd.readouterr()
    assert main([command, str(run_dir)]) == 1
    assert "the run was started with another store than these files and settings make" in capfd.readouterr().err
    assert not (run_dir / "store").exists()


@pytest.mark.parametrize("command", ["prepare", "train"])
def test_no_heldout_data_is_said(command: str, make_run: MakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    words = [command, str(make_run(**SHORT))]
    assert main(words) == 0
    said = capfd.readouterr().err
    assert said.count("no held-out data: ") == 1 and "data.heldout_share: 0.02" in said
    assert main([command, str(make_run("other", data={"store": None, "heldout_share": 0.1}, **SHORT))]) == 0
    assert "no held-out data" not in capfd.readouterr().err


@pytest.mark.parametrize("command", ["prepare", "train", "check"])
def test_one_file_for_both_roles_is_named(command: str, make_run: MakeRun, few_chats: Path, capfd) -> None:
    settings = make_run(data={"store": None, "heldout": [str(few_chats)]}, **SHORT)
    assert main([command, str(settings)]) == 1
    found = capfd.readouterr()
    assert f"data.heldout: {few_chats} is in data.train too" in found.out + found.err
