"""From chats to checkpoint with real parts: pipeline equals inline, and nothing is lost."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from paceline.checkpoint import checkpoints
from paceline.cli import main
from paceline.drafter.learner import Learner
from paceline.run.learner_factory import learner_factory
from paceline.target_model.load import load_target
from paceline.target_model.model import TargetModel
from paceline.target_model.shared_weights import shared_weights
from processes import children_of
from small_runs import built

MakeRun = Callable[..., Path]


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoints.checkpoint_path(run_dir, step) / checkpoints.WEIGHTS)


def run_dir_of(settings: Path) -> Path:
    return Path(yaml.safe_load(settings.read_text())["run_dir"])


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def metric_lines(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def start(settings: Path, log: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "paceline", "train", str(settings)]
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def wait_for_checkpoint(process: subprocess.Popen, run_dir: Path, step: int, log: Path) -> None:
    deadline = time.monotonic() + 240
    while checkpoints.newest_step(run_dir) < step:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def replayed(settings_file: Path, steps: int) -> dict[str, torch.Tensor]:
    """One learner trained in this process on the windows that a run with several drafter ranks planned."""
    run = built(settings_file)
    target = load_target(run.settings.target, run.taps)
    learner = dataclasses.replace(learner_factory(run), first_step=0)(shared_weights(target))
    batches = run.plan.host_batches(run.steps[:steps], range(run.num_ranks), run.num_ranks)
    for planned in run.steps[:steps]:
        for _ in planned.batches:
            learner.accumulate(target.features(next(batches)))
        learner.step(planned)
    return learner.state_dict()["network"]


def test_pipeline_equals_inline_bit_for_bit_after_30_steps(make_run: MakeRun) -> None:
    inline, pipeline = (
        make_run("inline"),
        make_run("pipeline", flow={"mode": "pipeline", "target_devices": ["cpu", "cpu"]}),
    )
    assert main(["train", str(inline)]) == 0
    assert main(["train", str(pipeline)]) == 0
    assert same(weights(run_dir_of(inline), 30), weights(run_dir_of(pipeline), 30))
    theirs, ours = metric_lines(run_dir_of(inline)), metric_lines(run_dir_of(pipeline))
    assert [line["step"] for line in ours] == list(range(1, 31))
    assert [line["values"]["loss"] for line in ours] == [line["values"]["loss"] for line in theirs]


def test_two_ranks_learn_what_one_learns(make_run: MakeRun) -> None:
    """Two ranks × 1 micro-batch and one rank × 2 plan other windows of the same size; compare with one rank's replay.

    The plan nests strata for replicas, so the windows are the two-rank run's own: the one-rank reference below trains
    exactly those windows.
    """
    two = make_run(
        "two",
        flow={"mode": "pipeline", "drafter_devices": ["cpu", "cpu"]},
        plan={"accumulate": 1},
        train={"max_steps": 6},
    )
    assert main(["train", str(two)]) == 0
    reference = replayed(two, steps=6)
    trained = weights(run_dir_of(two), 6)
    for name, tensor in reference.items():
        assert torch.allclose(trained[name], tensor, atol=2e-5), name


def test_ranks_that_share_the_optimizer_out_learn_the_same(make_run: MakeRun) -> None:
    """Against two ranks that each hold all of its state, with a checkpoint and going on from it, bit for bit."""
    given: Any = {
        "flow": {"mode": "pipeline", "drafter_devices": ["cpu", "cpu"]},
        "plan": {"accumulate": 1},
        "train": {"max_steps": 6},
        "checkpoint": {"every_steps": 3},
    }
    plain, shared = make_run("plain", **given), make_run("shared", **given, optimizer={"shard": True})
    for settings in (plain, shared):
        assert main(["train", str(settings)]) == 0
    for step in (3, 6):
        one, other = (checkpoints.read_checkpoint(run_dir_of(settings), step) for settings in (plain, shared))
        assert same(one["network"], other["network"])
        moments, gathered = (state["optimizer"]["adamw"]["state"] for state in (one, other))
        assert moments.keys() == gathered.keys() and all(same(moments[n], gathered[n]) for n in moments)
    for file in checkpoints.checkpoint_path(run_dir_of(shared), 6).iterdir():
        file.unlink()
    checkpoints.checkpoint_path(run_dir_of(shared), 6).rmdir()
    assert main(["train", str(run_dir_of(shared))]) == 0
    assert same(weights(run_dir_of(plain), 6), weights(run_dir_of(shared), 6))


def test_teacher_distributions_cross_the_pipeline_unchanged(make_run: MakeRun) -> None:
    objective = {"terms": {"ce": 0.5, "kl": 0.5}}
    inline = make_run("inline", objective=objective, train={"max_steps": 4})
    pipeline = make_run("pipeline", objective=objective, train={"max_steps": 4}, flow={"mode": "pipeline"})
    assert main(["train", str(inline)]) == 0
    assert main(["train", str(pipeline)]) == 0
    assert same(weights(run_dir_of(inline), 4), weights(run_dir_of(pipeline), 4))
    plain = make_run("plain", train={"max_steps": 4})
    assert main(["train", str(plain)]) == 0
    assert not same(weights(run_dir_of(plain), 4), weights(run_dir_of(inline), 4))


def test_validation_is_equal_in_both_modes(make_run: MakeRun, demo_assets: Path, tmp_path: Path) -> None:
    heldout = {"heldout": [str(demo_assets / "heldout.jsonl")], "store": str(tmp_path / "own")}
    evaluate = {"every_steps": 2, "validation_samples": 6}
    inline = make_run("inline", data=heldout, evaluate=evaluate, train={"max_steps": 4})
    pipeline = make_run("pipeline", data=heldout, evaluate=evaluate, train={"max_steps": 4}, flow={"mode": "pipeline"})
    assert main(["train", str(inline)]) == 0
    assert main(["train", str(pipeline)]) == 0
    without = make_run("without", data=heldout, evaluate={"validation_samples": 0}, train={"max_steps": 4})
    assert main(["train", str(without)]) == 0
    found = [
        {line["step"]: line["values"].get("validation/loss") for line in metric_lines(run_dir_of(run))}
        for run in (inline, pipeline)
    ]
    assert found[0] == found[1]
    assert [step for step, value in found[0].items() if value is not None] == [2, 4]
    assert found[0][4] < found[0][2]
    assert same(weights(run_dir_of(inline), 4), weights(run_dir_of(without), 4))
    assert same(weights(run_dir_of(inline), 4), weights(run_dir_of(pipeline), 4))


def test_the_loss_falls_and_the_weights_move(make_run: MakeRun) -> None:
    settings = make_run()
    assert main(["train", str(settings)]) == 0
    losses = [line["values"]["loss"] for line in metric_lines(run_dir_of(settings))]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    first, last = weights(run_dir_of(settings), 10), weights(run_dir_of(settings), 30)
    assert all(not torch.equal(first[name], last[name]) for name in first)


def test_killed_in_the_middle_a_run_goes_on_to_the_same_weights(make_run: MakeRun, tmp_path: Path) -> None:
    whole = make_run("whole", flow={"mode": "pipeline"})
    assert main(["train", str(whole)]) == 0
    broken, log = make_run("broken", flow={"mode": "pipeline"}), tmp_path / "log"
    process = start(broken, log)
    wait_for_checkpoint(process, run_dir_of(broken), 10, log)
    family = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 10 <= checkpoints.newest_step(run_dir_of(broken)) < 30, "killed too late to prove anything"
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()], "orphans"
    assert main(["train", str(run_dir_of(broken))]) == 0
    assert same(weights(run_dir_of(whole), 30), weights(run_dir_of(broken), 30))
    assert [line["step"] for line in metric_lines(run_dir_of(broken))] == list(range(1, 31))


@pytest.mark.slow
def test_killed_with_ready_delivery_each_batch_counts_once(make_run: MakeRun, tmp_path: Path) -> None:
    """Two targets, whatever is ready first: after two kills, every step trained its own micro-batches, once."""
    flow = {"mode": "pipeline", "delivery": "ready", "target_devices": ["cpu", "cpu"]}
    settings = make_run("ready", flow=flow, checkpoint={"every_steps": 5})
    for number, step in enumerate((5, 15)):
        log = tmp_path / f"log-{number}"
        process = start(settings, log)
        wait_for_checkpoint(process, run_dir_of(settings), step, log)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert checkpoints.newest_step(run_dir_of(settings)) < 30, "killed too late to prove anything"
    assert main(["train", str(settings)]) == 0
    lines = metric_lines(run_dir_of(settings))
    planned = built(settings).steps
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert [sorted(line["batches"]) for line in lines] == [list(step.batches) for step in planned]


def test_ctrl_c_checkpoints_and_ends_with_0_and_the_run_goes_on(make_run: MakeRun, tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = make_run("stopped", flow={"mode": "pipeline"}, train={"epochs": 100, "max_steps": 999})
    process = start(settings, log)
    wait_for_checkpoint(process, run_dir_of(settings), 10, log)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, log.read_text()
    text = log.read_text()
    assert "Traceback" not in text
    stopped_at = checkpoints.newest_step(run_dir_of(settings))
    assert re.search(rf"stopped at step {stopped_at} of \d+, checkpoint written", text)
    assert stopped_at < 90
    assert [line["step"] for line in metric_lines(run_dir_of(settings))] == list(range(1, stopped_at + 1))


def test_a_finished_run_is_left_as_it_is(make_run: MakeRun, capfd) -> None:
    settings = make_run(train={"max_steps": 2})
    assert main(["train", str(settings)]) == 0
    before = (run_dir_of(settings) / "metrics.jsonl").read_bytes()
    assert main(["train", str(settings)]) == 0
    assert (run_dir_of(settings) / "metrics.jsonl").read_bytes() == before


def test_bf16_compute_keeps_float32_masters(make_run: MakeRun) -> None:
    settings = make_run(drafter={"dtype": "bfloat16"}, target={"dtype": "bfloat16"}, train={"max_steps": 3})
    assert main(["train", str(settings)]) == 0
    assert {tensor.dtype for tensor in weights(run_dir_of(settings), 3).values()} == {torch.float32}


@pytest.mark.parametrize("mode", ["inline", "pipeline"])
def test_deterministic_runs_say_so_to_every_worker(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    seen: list[Any] = []

    class Asked(Exception):
        pass

    def load(*_: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        raise Asked

    def worker(name: str, *_: Any, **given: Any) -> Any:
        seen.append(given["deterministic"])
        if name.startswith("drafter"):
            raise Asked
        return SimpleNamespace(stop=lambda patience_s: None)

    monkeypatch.setattr("paceline.target_model.load.load_target", load)
    monkeypatch.setattr(import_module("paceline.train"), "WorkerProcess", worker)
    settings = make_run(mode, train={"deterministic": True, "max_steps": 2}, flow={"mode": mode})
    with pytest.raises(Asked):
        main(["train", str(settings)])
    assert seen == [True] if mode == "inline" else [True, True]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("role", ["target", "drafter", "step", "load", "make"])
def test_inline_out_of_memory_names_stage_and_batch(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], role: str
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    place = {
        "target": (TargetModel, "features"),
        "drafter": (Learner, "accumulate"),
        "step": (Learner, "step"),
        "load": (import_module("paceline.target_model.load"), "load_target"),
        "make": (Learner, "__init__"),
    }
    monkeypatch.setattr(*place[role], full)
    assert main(["train", str(make_run())]) == 1
    error = capfd.readouterr().err
    batch = r"on batch \d+ of epoch \d \(samples "
    stage, what = {
        "target": ("target", batch), "drafter": ("drafter", batch), "step": ("drafter", "in a step"),
        "load": ("target", "on start-up"), "make": ("drafter", "on start-up"),
    }[role]  # fmt: skip
    assert re.search(rf"error: stage {stage} failed {what}.*out of memory", error)
    assert "Traceback" not in error
