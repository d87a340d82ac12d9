"""Which checkpoint is the best, and who names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import checkpoints, run_directory
from paceline.checkpoint.best import BestCheckpoint, best_checkpoint, best_step
from paceline.cli import main
from paceline.errors import CheckpointError


def written(run_dir: Path, values: dict[int, dict[str, float]], best_by: dict[str, str] | None = None) -> None:
    for step, metrics in values.items():
        state = {"network": {"fc.weight": torch.ones(2)}}
        checkpoints.write_checkpoint(run_dir, step, state, keep_last=9, note={"metrics": metrics, "best_by": best_by})


def decoded(run_dir: Path, values: dict[int, float]) -> None:
    for step, tau in values.items():
        run_directory.add_evaluation(run_dir, step, {"tau_micro": tau, "tau_macro": 1.0})


def test_by_held_out_tau_where_nothing_is_asked_for(tmp_path: Path) -> None:
    written(tmp_path, {1: {"validation/tau": 2.0}, 2: {"validation/tau": 3.0}, 3: {}})
    assert best_checkpoint(tmp_path) == BestCheckpoint(2, "validation/tau", 3.0)
    decoded(tmp_path, {3: 9.0})  # one number alone compares nothing
    assert best_step(tmp_path) == 2
    decoded(tmp_path, {1: 4.0, 7: 99.0})  # step 7 is not kept
    assert str(best_checkpoint(tmp_path)) == "step 3 (decode/tau 9.000)"


def test_by_the_metric_of_the_settings(tmp_path: Path) -> None:
    lower = {"metric": "validation/loss", "better": "lower"}
    written(tmp_path, {n: {"validation/loss": loss, "validation/tau": loss} for n, loss in ((1, 3.0), (2, 2.0))}, lower)
    assert best_checkpoint(tmp_path) == BestCheckpoint(2, "validation/loss", 2.0)


def test_none_where_none_was_measured(tmp_path: Path) -> None:
    assert best_checkpoint(tmp_path) is None
    written(tmp_path, {1: {}})
    assert best_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="no checkpoint was measured on held-out samples"):
        best_step(tmp_path)


@pytest.fixture(scope="module")
def trained(settings_of: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with held-out samples, in which the second of three checkpoints is made the best."""
    import yaml

    folder = tmp_path_factory.mktemp("best")
    settings = settings_of(folder / "run", data={"store": str(folder / "store"), "heldout_share": 0.2})
    settings["evaluate"] = {"every_steps": 2, "num_prompts": 1, "max_new_tokens": 4}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train", str(folder / "run.yaml")]) == 0
    decoded(folder / "run", {2: 1.0, 4: 2.0, 6: 1.5})
    return folder / "run"


def test_every_place_names_it(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(trained), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best_checkpoint"] == {"step": 4, "metric": "decode/tau", "value": 2.0}
    assert main(["status", str(trained)]) == 0
    assert "checkpoint of step 6, best: step 4 (decode/tau 2.000)" in capsys.readouterr().out
    assert main(["train", str(trained), "--observe.console", "plain"]) == 0
    assert "best checkpoint: step 4 (decode/tau 2.000)" in capsys.readouterr().err
    assert main(["report", str(trained), "--out", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "best checkpoint" in text and "decode/tau 2.000" in text
    assert main(["export", str(trained), "--best", "--out", str(tmp_path / "drafter"), "--golden", "none"]) == 0
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "| optimizer steps | 4 of 6 |" in card
    assert "| best checkpoint of the run | this one, step 4 (decode/tau 2.000) |" in card


def test_evaluate_takes_the_best(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {entry["step"]: entry for entry in run_directory.read_evaluations(trained)}
    words = ["evaluate", str(trained), "--best", "--no-lossless", "--evaluate.max-new-tokens", "3"]
    assert main(words) == 0
    assert [entry["step"] for entry in run_directory.read_evaluations(trained, "others")] == [4]
    assert {entry["step"]: entry for entry in run_directory.read_evaluations(trained)} == before
    for command in ("evaluate", "export"):
        assert main([command, str(trained), "--best", "--step", "2"]) == 2
        assert "--best: does not go with --step 2" in capsys.readouterr().err
