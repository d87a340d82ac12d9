"""What `paceline train` and `paceline prepare` do with the store of a run, and what they say of held-out data."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.data.store import open_store

MakeRun = Callable[..., Path]
SHORT = {"train": {"max_steps": 2}, "checkpoint": {"every_steps": 1}}


@pytest.fixture
def own_store(make_run: MakeRun, tmp_path: Path) -> Path:
    """A settings file of a short run whose store is in its run directory."""
    return make_run(data={"store": None, "heldout_share": 0.1}, observe={"console": "plain"}, **SHORT)


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


@pytest.mark.parametrize("command", ["prepare", "train", "check"])
def test_a_copy_as_held_out_file_is_named(
    command: str, make_run: MakeRun, few_chats: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copy(few_chats, tmp_path / "copy.jsonl")
    assert main([command, str(make_run(data={"store": None, "heldout": [str(copy)]}, **SHORT))]) == 1
    found = capfd.readouterr()
    assert "data.heldout asks all that data.train asks: name a file of other chats there" in found.out + found.err


@pytest.mark.parametrize("command", ["train", "check"])
def test_held_out_prompts_without_answers_are_named(
    command: str, make_run: MakeRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"messages": [{"role": "user", "content": "and now?"}]}\n', encoding="utf-8")
    data = {"data": {"store": None, "heldout": [str(asked)]}, **SHORT}
    assert main([command, str(make_run(**data))]) == 1
    found = capfd.readouterr()
    says = "data.heldout: of 1 rows none can be measured: 1 × no assistant turn after a question, for example "
    assert f"{says}{asked}:1" in found.out + found.err
    if command == "train":
        assert main(["train", str(make_run("without", evaluate={"validation_samples": 0}, **data))]) == 0


@pytest.mark.parametrize("phase", ["paceline.cli.train.ready_store", "paceline.target_model.load.load_target"])
def test_ctrl_c_while_starting_trains_nothing(
    phase: str, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    settings = str(make_run(data={"store": None}, observe={"console": "plain"}, **SHORT))
    module, _, name = phase.rpartition(".")
    original = getattr(import_module(module), name)

    def interrupted(*arguments: object, **named: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return original(*arguments, **named)

    monkeypatch.setattr(phase, interrupted)
    assert main(["train", settings]) == 130
    said = capfd.readouterr().err
    assert said.count("nothing was trained in this start") == 1 and "error" not in said and "failed" not in said
    monkeypatch.undo()
    assert main(["train", settings]) == 0
    assert "finished before" not in capfd.readouterr().err


def test_a_finished_run_that_is_started_again_says_so(make_run: MakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    settings = str(make_run(observe={"console": "plain"}, **SHORT))
    assert main(["train", settings]) == 0
    assert "trained 2 steps; next: paceline evaluate" in capfd.readouterr().err
    assert main(["train", settings]) == 0
    assert "finished before, all 2 steps; next: paceline evaluate" in capfd.readouterr().err


def test_quiet_prints_warnings_only(make_run: MakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    settings = make_run(data={"store": None, "heldout_share": 0.1}, observe={"console": "quiet"}, **SHORT)
    assert main(["train", str(settings)]) == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("command", [["evaluate", "--prompts"], ["export", "--out"]])
def test_a_step_without_a_checkpoint_lists_those_there_are(
    command: list[str], make_run: MakeRun, tmp_path: Path, few_chats, capfd
) -> None:
    assert main(["train", str(make_run(**SHORT))]) == 0
    capfd.readouterr()
    value = str(few_chats) if command[0] == "evaluate" else str(tmp_path / "out")
    assert main([command[0], str(tmp_path / "run"), "--step", "77", command[1], value]) == 1
    assert "no checkpoint of step 77; there are: 1, 2; give one of them" in capfd.readouterr().err
