"""A run whose directory, run.json or metrics file somebody deletes or replaces while it trains."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint import checkpoints
from paceline.checkpoint.checkpoints import CheckpointWriter
from paceline.checkpoint.run_files import RunFiles
from paceline.cli import main
from paceline.config import CheckpointConfig
from paceline.errors import RunDirectoryError
from paceline.observe.observer import Observer

STEPS = 6
IN_PROCESSES = pytest.mark.slow  # workers are started twice
MakeRun = Callable[..., Path]


def weights(run_dir: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(checkpoints.checkpoint_path(run_dir, step) / checkpoints.WEIGHTS)


def meddled(monkeypatch: pytest.MonkeyPatch, step: int, deed: Callable[[], object]) -> None:
    """Do something to the run when a step has been taken in, before its checkpoint."""
    take = Observer.step

    def stepped(self: Observer, report: object) -> None:
        take(self, report)
        if report.step == step:
            deed()

    monkeypatch.setattr(Observer, "step", stepped)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.parametrize(
    ("mode", "what"), [("inline", "run.json"), pytest.param("pipeline", "directory", marks=pytest.mark.slow)]
)
def test_a_lost_run_is_saved_elsewhere_and_goes_on_there(
    mode: str,
    what: str,
    make_run: MakeRun,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = tmp_path / "run"
    gone = run_dir if what == "directory" else run_dir / "run.json"
    meddled(monkeypatch, 2, lambda: shutil.rmtree(gone) if gone.is_dir() else gone.unlink())
    assert main(["train", str(make_run(flow={"mode": mode, "delivery": "ordered"}))]) == 1
    line = error_of(capsys)
    assert f"{gone}: was removed while the run trained; the state of step 2 is in " in line
    rescued = Path(re.findall(r"paceline train (\S+)", line)[0])
    assert rescued.parent == tmp_path and checkpoints.steps(rescued) == [2]
    assert what == "run.json" or not run_dir.exists()
    monkeypatch.undo()
    assert main(["train", str(rescued)]) == 0
    assert all(torch.equal(value, weights(finished)[name]) for name, value in weights(rescued).items())


@pytest.mark.parametrize(("mode", "step"), [("inline", STEPS), pytest.param("pipeline", 2, marks=IN_PROCESSES)])
def test_a_lost_metrics_file_ends_the_run_after_its_checkpoint(
    mode: str,
    step: int,
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = tmp_path / "run"
    metrics, settings = run_dir / "metrics.jsonl", make_run(flow={"mode": mode, "delivery": "ordered"})
    meddled(
        monkeypatch,
        step,
        metrics.unlink if step == 2 else lambda: Path(shutil.copy(metrics, tmp_path)).replace(metrics),
    )
    assert main(["train", str(settings)]) == 1
    how = "was removed" if step == 2 else "was replaced by another file"
    line = error_of(capsys)
    assert f"{metrics}: {how} while the run wrote it" in line
    assert f"the checkpoint of step {step} is kept, run the same command to resume" in line
    assert checkpoints.newest_step(run_dir) == step
    monkeypatch.undo()
    assert main(["train", str(settings)]) == 0
    err = capsys.readouterr().err
    assert ("no metrics of steps 1–2" in err) == (step == 2)


def test_another_run_in_its_place_is_left_alone(finished: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(finished, tmp_path / "run"))
    writer = pickle.loads(pickle.dumps(CheckpointWriter(run_dir, CheckpointConfig())))
    facts = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**facts, "total_steps": 7}))
    before = checkpoints.steps(run_dir)
    writer.put(8, {"network": {"fc.weight": torch.ones(2)}, "steps_done": 8}, {})
    with pytest.raises(RunDirectoryError, match=r"run.json: was replaced by another run's .*step 8 is in .*rescued-"):
        writer.wait()
    assert checkpoints.steps(run_dir) == before
    [rescued] = tmp_path.glob("run.rescued-*")
    assert checkpoints.steps(rescued) == [8] and rescued.stat().st_mode & 0o077 == 0


def test_a_state_that_fits_nowhere_is_said_to_be_lost(finished: Path, tmp_path: Path, monkeypatch) -> None:
    run_dir = Path(shutil.copytree(finished, tmp_path / "inside" / "run"))
    writer = CheckpointWriter(run_dir, CheckpointConfig())
    shutil.rmtree(tmp_path / "inside")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "inside"))
    writer.put(8, {"network": {"fc.weight": torch.ones(2)}, "steps_done": 8}, {})
    with pytest.raises(RunDirectoryError, match=r"could not be saved elsewhere .* the state of step 8 is lost"):
        writer.wait()


def test_a_folder_that_is_no_run_cannot_be_lost(tmp_path: Path) -> None:
    assert RunFiles.of(tmp_path / "nothing").lost() is None
