"""Users' mistakes: one clear line each, an exit code, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import main

MakeRun = Callable[..., Path]


def refused(argv: list[str], capfd: pytest.CaptureFixture[str], code: int) -> str:
    assert main(argv) == code
    text = capfd.readouterr().err
    assert "Traceback" not in text
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, text
    return errors[0]


def chats(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


TALK = [
    {"role": "user", "content": "What is `json.dumps` for?"},
    {"role": "assistant", "content": "It writes JSON text."},
]
LONG = [TALK[0], {"role": "assistant", "content": "x" * 9000}]


def prepare_only(make_run: MakeRun, tmp_path: Path, data: Path, **changes: object) -> Path:
    return make_run(data={"train": [str(data)], "store": str(tmp_path / "own-store"), **changes})


def test_an_empty_data_file(make_run: MakeRun, tmp_path: Path, capfd) -> None:
    settings = prepare_only(make_run, tmp_path, chats(tmp_path / "empty.jsonl"))
    assert "empty.jsonl" in refused(["prepare", str(settings)], capfd, 1)
    assert not (tmp_path / "own-store").exists()


def test_a_missing_data_file(make_run: MakeRun, tmp_path: Path, capfd) -> None:
    assert "nowhere.jsonl" in refused(
        ["prepare", str(prepare_only(make_run, tmp_path, tmp_path / "nowhere.jsonl"))], capfd, 1
    )


@pytest.mark.parametrize(
    "row",
    [
        {"text_": "no messages"},
        {"messages": TALK[:1]},
        {"messages": LONG},
    ],
    ids=["no messages", "no assistant turn", "longer than the maximum"],
)
def test_unusable_rows_are_counted_and_others_kept(make_run: MakeRun, tmp_path: Path, capfd, row: dict) -> None:
    data = chats(tmp_path / "mixed.jsonl", row, {"messages": TALK})
    settings = prepare_only(make_run, tmp_path, data, max_length=256)
    assert main(["prepare", str(settings), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["samples"] == 1
    (reason,) = report["set_aside"].values()
    assert reason["count"] == 1 and "mixed.jsonl:1" in reason["example"]


@pytest.mark.parametrize("row", [{"text_": "no messages"}, {"messages": TALK[:1]}], ids=["no messages", "no assistant"])
def test_nothing_left_to_train_on(make_run: MakeRun, tmp_path: Path, capfd, row: dict) -> None:
    settings = prepare_only(make_run, tmp_path, chats(tmp_path / "bad.jsonl", row))
    assert "bad.jsonl:1" in refused(["train", str(settings)], capfd, 1)
    assert not (tmp_path / "own-store").exists()
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_no_model(make_run: MakeRun, tmp_path: Path, capfd) -> None:
    (tmp_path / "empty-model").mkdir()
    settings = make_run(target={"path": str(tmp_path / "empty-model")})
    assert "empty-model" in refused(["train", str(settings)], capfd, 1)
    assert "not-there" in refused(["train", str(make_run(target={"path": str(tmp_path / "not-there")}))], capfd, 1)


def test_a_width_that_the_drafter_cannot_have(make_run: MakeRun, capfd) -> None:
    line = refused(["train", str(make_run(drafter={"hidden_size": 96}))], capfd, 2)
    assert "hidden_size" in line and "as wide as the target" in line


def test_a_bad_tap_is_refused_before_the_data_is_touched(make_run: MakeRun, tmp_path: Path, few_chats, capfd) -> None:
    settings = make_run(data={"train": [str(few_chats)], "store": str(tmp_path / "own")}, target={"taps": [1, 99]})
    assert "99" in refused(["train", str(settings)], capfd, 1)
    assert not (tmp_path / "own").exists()


def test_a_finished_run_with_a_damaged_checkpoint_says_so(make_run: MakeRun, tmp_path: Path, capfd) -> None:
    settings = make_run(train={"max_steps": 2})
    assert main(["train", str(settings)]) == 0
    (state,) = (tmp_path / "run" / "checkpoints").rglob("state.pt")
    state.write_bytes(state.read_bytes()[:100])
    capfd.readouterr()
    line = refused(["train", str(settings)], capfd, 1)
    assert "no checkpoint can be used: step-00000002 damaged (state.pt has 100 bytes" in line
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def test_a_folder_without_a_run(tmp_path: Path, capfd) -> None:
    assert "a folder without a run" in refused(["train", str(tmp_path)], capfd, 2)


def test_taps_that_the_target_does_not_have(make_run: MakeRun, capfd) -> None:
    assert "8" in refused(["train", str(make_run(target={"taps": [1, 8]}))], capfd, 1)


def test_a_run_directory_of_another_configuration(make_run: MakeRun, capfd) -> None:
    assert main(["train", str(make_run(train={"max_steps": 1}))]) == 0
    capfd.readouterr()
    line = refused(["train", str(make_run(train={"max_steps": 1}, seed=9))], capfd, 1)
    assert "made with seed = 0, asked for 9" in line


def test_a_run_directory_that_is_something_else(make_run: MakeRun, tmp_path: Path, capfd) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    assert "thesis.tex" in refused(["train", str(make_run())], capfd, 1)


def test_a_device_that_is_not_there(make_run: MakeRun, capfd) -> None:
    line = refused(["train", str(make_run(flow={"mode": "pipeline", "target_devices": ["cuda:63"]}))], capfd, 2)
    assert "cuda:63" in line


def test_packed_plans_and_packed_rows_go_together(make_run: MakeRun, capfd) -> None:
    assert "set both to packed" in refused(["train", str(make_run(plan={"strategy": "packed"}))], capfd, 2)
    assert "set both to packed" in refused(["train", str(make_run(target={"rows": "packed"}))], capfd, 2)


def test_a_target_that_changed_under_the_run(make_run: MakeRun, tmp_path: Path, demo_assets: Path, capfd) -> None:
    copy = tmp_path / "target"
    shutil.copytree(demo_assets / "target", copy)
    settings = make_run(target={"path": str(copy)}, train={"max_steps": 1})
    assert main(["train", str(settings)]) == 0
    capfd.readouterr()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_window_layers": 27}))
    assert main(["train", str(settings)]) == 1
    told = capfd.readouterr().err
    assert "error: " in told and "made with another target, which differs in configuration;" in told
    assert "prepared for another target, which differs in configuration;" in told


def test_a_device_that_the_target_cannot_spread_to(make_run: MakeRun, tmp_path: Path, capfd) -> None:
    settings = make_run(target={"device_map": ["cuda:63"]})
    assert "target.device_map: cuda:63: this machine has no CUDA device" in refused(["train", str(settings)], capfd, 1)
    assert not (tmp_path / "run").exists()


def test_unknown_command_and_flag(capfd) -> None:
    assert main(["trian", "x"]) == 2
    assert "did you mean train?" in capfd.readouterr().err
    assert main(["train", "x.yaml", "--optimizr.lr", "1"]) == 2
    assert "did you mean optimizer.lr?" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"drafter": {"attention": "flex"}}, "flex trains on CUDA only"),
        ({"drafter": {"head": "liger"}}, "liger trains on CUDA only"),
        ({"seed": 2**64}, "seed"),
        ({"target": {"adapter": "tuned", "quantization": "8bit"}}, "cannot be merged into weights that are quantized"),
        (
            {"target": {"device_map": "auto"}, "flow": {"mode": "pipeline", "target_devices": ["cpu", "cpu"]}},
            "list one",
        ),
        ({"objective": {"gamma": 1e-50}}, "objective.gamma"),
        ({"optimizer": {"shard": True}}, "flow.drafter_devices lists 1; list several"),
        (
            {
                "train": {"deterministic": True},
                "flow": {"mode": "pipeline", "delivery": "ready", "target_devices": ["cpu", "cpu"]},
            },
            "set flow.delivery to ordered",
        ),
    ],
)
def test_what_cannot_train_here_is_refused_first(
    make_run: MakeRun, tmp_path: Path, capfd, changes: dict, says: str
) -> None:
    assert says in refused(["train", str(make_run(**changes))], capfd, 2)
    assert not (tmp_path / "run").exists()


def test_no_taps_at_all_are_refused(make_run: MakeRun, capfd) -> None:
    assert "no layer is tapped" in refused(["train", str(make_run(target={"taps": []}))], capfd, 1)
