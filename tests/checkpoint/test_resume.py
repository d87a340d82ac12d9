"""Real runs: what checkpoints hold, and that going on from one gives what an undisturbed run gives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from paceline.atomic_files import ASIDE
from paceline.checkpoint import checkpoints, run_directory
from paceline.cli import main
from paceline.export.zlab import read_zlab

STEPS = 6
MakeRun = Callable[..., Path]


def weights(run_dir: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(checkpoints.checkpoint_path(run_dir, step) / checkpoints.WEIGHTS)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def lines(run_dir: Path) -> list[dict]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == "step"]


def trained(run_dir: Path) -> list[tuple]:
    """Step, place in the plan and micro-batches of every line, these in ascending order."""
    return [(line["step"], line["epoch"], line["window"], sorted(line["batches"])) for line in lines(run_dir)]


def forget_after(run_dir: Path, step: int) -> None:
    """As a kill leaves it between the metrics of a step and its checkpoint: lines that no checkpoint holds."""
    for later in checkpoints.steps(run_dir):
        if later > step:
            shutil.rmtree(checkpoints.checkpoint_path(run_dir, later))


def test_a_checkpoint_holds_what_the_run_is_and_where_it_stands(finished: Path) -> None:
    assert checkpoints.steps(finished) == [2, 4, 6]
    note, facts = checkpoints.read_note(finished, 4), json.loads((finished / "run.json").read_text())
    line = lines(finished)[3]
    assert (note["step"], note["epoch"], note["window"]) == (4, line["epoch"], line["window"])
    assert note["micro_batches"] == sum(len(entry["batches"]) for entry in lines(finished)[:4])
    assert note["run"] == facts and facts["replicas"] == 1 and facts["total_steps"] == STEPS
    assert {"drafter", "target", "target_fingerprint", "data_fingerprint"} <= note["run"].keys()
    assert note["settings"]["optimizer"]["lr"] == 1e-3 and note["versions"]["torch"] == version("torch")
    state = checkpoints.read_checkpoint(finished, 4)
    assert state["steps_done"] == 4 and state["skipped_in_row"] == 0
    assert {tensor.dtype for tensor in state["network"].values()} == {torch.float32}
    moments = [value for entry in state["optimizer"]["adamw"]["state"].values() for value in entry.values()]
    assert len(moments) == 3 * len(state["network"])


def test_kept_checkpoints_are_measured_and_exported(
    make_run: MakeRun, demo_assets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ahead: list[tuple[int, int]] = []
    write = checkpoints.write_checkpoint

    def watched(run_dir: Path, step: int, *arguments: object, **options: object) -> Path:
        ahead.append((step, lines(run_dir)[-1]["step"]))
        return write(run_dir, step, *arguments, **options)

    monkeypatch.setattr(checkpoints, "write_checkpoint", watched)
    settings = make_run(
        data={"heldout": [str(demo_assets / "heldout.jsonl")], "store": str(tmp_path / "own")},
        evaluate={"every_steps": 100, "validation_samples": 4},
        checkpoint={"every_steps": 2, "keep_last": 1, "keep_best": "validation/loss", "export": "zlab"},
        # The learning rate is absurd in the end, so that the best is not the last.
        optimizer={"lr": 0.5, "schedule": "constant", "warmup": 0.99},
        observe={"every_steps": 100, "console": "quiet"},
    )
    assert main(["train", str(settings)]) == 0
    run = tmp_path / "run"
    assert ahead == [(2, 2), (4, 4), (6, 6)]
    found = {line["step"]: line["values"].get("validation/loss") for line in lines(run)}
    losses = {step: loss for step, loss in found.items() if loss is not None}
    assert list(losses) == [2, 4, 6]
    best = min(losses, key=lambda step: losses[step])
    assert checkpoints.steps(run) == sorted({best, 6})
    assert [checkpoints.read_note(run, step)["metrics"]["validation/loss"] for step in checkpoints.steps(run)] == [
        losses[step] for step in checkpoints.steps(run)
    ]
    assert sorted(path.name for path in (run / "export").iterdir()) == [
        checkpoints.step_name(s) for s in checkpoints.steps(run)
    ]
    _, exported = read_zlab(checkpoints.export_path(run, 6))
    assert same(exported, {name: tensor.bfloat16() for name, tensor in weights(run).items()})


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"checkpoint": {"keep_best": "validaton/loss"}}, "keep_best = 'validaton/loss': no metric of the catalogue"),
        ({"checkpoint": {"keep_best": "learning_rate"}}, "'learning_rate': neither less nor more of it is better"),
        ({"checkpoint": {"keep_best": "validation/loss"}}, "is never measured without held-out samples"),
        ({"checkpoint": {"keep_best": "decode/tau"}}, "is measured by the evaluator alone"),
        (
            {"checkpoint": {"export": "zlab"}, "drafter": {"sample_from_anchor": True}},
            "checkpoint.export = zlab: format zlab: has no key for sample_from_anchor",
        ),
    ],
)
def test_what_can_never_be_kept_or_exported_is_refused_first(
    make_run: MakeRun, capfd, sections: dict, line: str
) -> None:
    settings = make_run(**sections)
    assert main(["train", str(settings)]) == 2
    text = capfd.readouterr().err
    assert line in text and "Traceback" not in text
    assert not (settings.with_suffix("") / "settings.yaml").exists()


@pytest.mark.parametrize("name", [checkpoints.WEIGHTS, checkpoints.STATE])
def test_a_damaged_newest_costs_one_warning_and_nothing_else(copied: Path, finished: Path, capfd, name: str) -> None:
    path = checkpoints.checkpoint_path(copied, 6) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert main(["train", str(copied)]) == 0
    warned = [line for line in capfd.readouterr().err.splitlines() if "damaged (" in line]
    assert len(warned) == 1 and "the run continues from step 4" in warned[0]
    assert same(weights(copied), weights(finished)) and trained(copied) == trained(finished)
    assert checkpoints.checkpoint_path(copied, 6).with_name("step-00000006.damaged").is_dir()


def test_more_ranks_and_workers_go_on_with_the_same_windows(copied: Path, finished: Path) -> None:
    """From the middle of an epoch: one rank and one target before, two of each after, in any order inside a window."""
    forget_after(copied, 2)
    assert lines(copied)[2]["window"] > 0, "the run must stand inside an epoch"
    flow = ["--flow.mode", "pipeline", "--flow.delivery", "ready"]
    devices = ["--flow.drafter-devices", "[cpu, cpu]", "--flow.target-devices", "[cpu, cpu]"]
    assert main(["train", str(copied), *flow, *devices]) == 0
    assert trained(copied) == trained(finished)
    ours, theirs = weights(copied), weights(finished)
    assert all(torch.allclose(ours[name], tensor, atol=2e-5) for name, tensor in theirs.items())
    assert json.loads((copied / "run.json").read_text())["replicas"] == 1


def test_lines_that_no_checkpoint_holds_are_written_again_once(copied: Path, finished: Path) -> None:
    forget_after(copied, 4)
    assert lines(copied)[-1]["step"] == 6
    assert main(["train", str(copied)]) == 0
    assert trained(copied) == trained(finished) and same(weights(copied), weights(finished))
    assert [line["values"]["loss"] for line in lines(copied)] == [line["values"]["loss"] for line in lines(finished)]


def test_target_and_data_may_lie_elsewhere(copied: Path, finished: Path, demo_assets: Path, tmp_path: Path) -> None:
    """The fingerprints say that they are the same; the weights are those of the run that did not move."""
    settings = yaml.safe_load((copied / "settings.yaml").read_text())
    target = shutil.copytree(demo_assets / "target", tmp_path / "moved target")
    data = shutil.copytree(settings["data"]["store"], tmp_path / "moved store")
    forget_after(copied, 4)
    assert main(["train", str(copied), "--target.path", str(target), "--data.store", str(data)]) == 0
    assert same(weights(copied), weights(finished)) and trained(copied) == trained(finished)
    forget_after(copied, 4)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    assert main(["train", str(copied)]) != 0


def test_other_versions_are_told(copied: Path, finished: Path, capfd, monkeypatch) -> None:
    forget_after(copied, 4)
    other = {**run_directory.versions(), "torch": "1.0.0"}
    monkeypatch.setattr(run_directory, "versions", lambda: other)
    assert main(["train", str(copied)]) == 0
    warned = [line for line in capfd.readouterr().err.splitlines() if "other versions" in line]
    assert len(warned) == 1 and f"torch {version('torch')} → 1.0.0" in warned[0]
    assert same(weights(copied), weights(finished))


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from paceline.cli import main
sys.exit(main(["train", sys.argv[2]]))
"""
"""The kernel refuses to grow files over a limit, as a full disk does: a real error in the middle of a file."""


@pytest.mark.parametrize(
    ("share", "what"), [(0.5, "checkpoint not written"), (None, "metrics.jsonl: cannot be written")]
)
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    copied: Path, finished: Path, share: float | None, what: str
) -> None:
    forget_after(copied, 2)
    path = checkpoints.checkpoint_path(copied, 2) / checkpoints.WEIGHTS
    limit = int(path.stat().st_size * share) if share else 12_000
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), str(copied)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert "Traceback" not in done.stderr and len(errors) == 1 and what in errors[0], done.stderr
    assert checkpoints.resume_point(copied) == (2, ())
    assert main(["train", str(copied)]) == 0
    assert same(weights(copied), weights(finished)) and trained(copied) == trained(finished)


def test_sigterm_while_a_checkpoint_is_written_leaves_whole_ones(make_run: MakeRun, tmp_path: Path) -> None:
    settings = make_run(
        "stopped",
        flow={"mode": "pipeline"},
        train={"epochs": 1000, "max_steps": 5000},
        checkpoint={"every_steps": 1, "keep_last": 2},
    )
    log, folder = tmp_path / "log", tmp_path / "stopped" / checkpoints.CHECKPOINTS
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "train", str(settings)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    deadline = time.monotonic() + 240
    while not (folder.is_dir() and any(path.name.endswith(ASIDE) for path in folder.iterdir())):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0, log.read_text()
    step = checkpoints.newest_step(tmp_path / "stopped")
    assert f"stopped at step {step} of 5000, checkpoint written" in log.read_text()
    assert checkpoints.resume_point(tmp_path / "stopped") == (step, ())
    assert not [path.name for path in folder.iterdir() if not path.name.removeprefix("step-").isdigit()]
    assert [line["step"] for line in lines(tmp_path / "stopped")] == list(range(1, step + 1))
