"""Real decoding in a process of its own while training goes on: what it reports, and that it changes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from paceline.checkpoint import checkpoints
from paceline.checkpoint.run_directory import read_evaluations, read_run_facts
from paceline.cli import main
from paceline.config import load_settings
from paceline.errors import CheckpointError
from paceline.run.eval_worker import EvalRequest, EvaluatorStage
from processes import children_of

MakeRun = Callable[..., Path]
FEW = {"num_prompts": 2, "max_new_tokens": 12, "dtype": "float64"}


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoints.checkpoint_path(run_dir, step) / checkpoints.WEIGHTS)


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of this file's own: it is prepared with held-out chats."""
    return tmp_path_factory.mktemp("stores") / "store"


def run_dir_of(settings: Path) -> Path:
    return Path(yaml.safe_load(settings.read_text())["run_dir"])


def lines_of(run_dir: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def events(run_dir: Path, name: str) -> list[dict]:
    return [line["fields"] for line in lines_of(run_dir, "event") if line["event"] == name]


@pytest.mark.parametrize("mode", ["inline", "pipeline"])
def test_what_training_reports_is_what_evaluate_measures(
    make_run: MakeRun, demo_assets: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    heldout = {"heldout": [str(demo_assets / "heldout.jsonl")]}
    more = {
        "data": heldout,
        "evaluate": {**FEW, "validation_samples": 0, "tree_budget": 8 if mode == "inline" else None},
        "train": {"max_steps": 12},
        "checkpoint": {"every_steps": 4, "keep_last": 9},
    }
    evaluate = {**more["evaluate"], "device": "cpu"}
    settings = make_run("with", flow={"mode": mode}, **{**more, "evaluate": evaluate})
    without = make_run("without", flow={"mode": mode}, **more)
    assert main(["train", str(settings)]) == 0
    assert main(["train", str(without)]) == 0
    run_dir = run_dir_of(settings)
    found = events(run_dir, "decoded")
    assert found[-1]["step"] == 12, "the last checkpoint is waited for"
    assert [entry["step"] for entry in found] == sorted({entry["step"] for entry in found})
    assert {entry["step"] for entry in found} <= {4, 8, 12}
    assert not events(run_dir, "warning") and not events(run_dir_of(without), "decoded")
    kept = {entry["step"]: entry for entry in read_evaluations(run_dir)}
    assert list(kept) == [entry["step"] for entry in found]
    assert all(bool(entry["rows"]) == (step == 12) for step, entry in kept.items())
    assert all((entry["tree_tau"] or 0) >= 1 for entry in kept.values()) == (mode == "inline")
    for line in lines_of(run_dir, "step"):
        if "decode/step" in line["values"]:
            assert line["values"]["decode/tau"] == kept[line["values"]["decode/step"]]["tau_micro"]
    capsys.readouterr()
    for entry in found:
        assert main(["evaluate", str(run_dir), "--step", str(entry["step"]), "--json"]) == 0
        (report,) = json.loads(capsys.readouterr().out).values()
        assert entry["values"]["decode/tau"] == report["tau_micro"]
        assert entry["values"]["decode/tau_macro"] == report["tau_macro"]
        assert entry["values"]["decode/training_tau"] == report["training_tau"]
        for rate in report["slots"]:
            assert entry["values"].get(f"decode/slot_{rate['slot']}") == rate["conditional"]
    ours, theirs = weights(run_dir, 12), weights(run_dir_of(without), 12)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "it changes nothing that is learned"
    if mode == "inline":
        check_card(run_dir, found[-1]["values"])
    losses = [[line["values"]["loss"] for line in lines_of(run_dir_of(run), "step")] for run in (settings, without)]
    assert losses[0] == losses[1]


def check_card(run_dir: Path, values: dict[str, float]) -> None:
    """The model card of the run's drafter holds what the run knows, the τ that was just measured among it."""
    assert main(["export", str(run_dir), "--golden", "none"]) == 0
    card = (run_dir / "export" / "zlab" / "README.md").read_text(encoding="utf-8")
    facts = read_run_facts(run_dir)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in card.splitlines() if line.startswith("|")]
    known = {row[0]: row[1:] for row in rows}
    assert known["fingerprint (configuration, weights, tokenizer)"] == [f"`{facts['target_fingerprint']}`"]
    assert known["fingerprint"] == [f"`{facts['data_fingerprint']}`"]
    assert known["optimizer steps"] == ["12 of 12"] and known["`optimizer.lr`"] == ["0.001"]
    assert known["samples"] == ["80"] and int(known["supervised tokens"][0]) > 0
    columns = known["step"]
    assert known["12"][columns.index("τ micro")] == f"{values['decode/tau']:.3f}"
    assert known["no-thinking"][0] == f"{values['decode/tau']:.3f}", "a tag of all prompts"
    for command in ("python -m sglang.launch_server", "vllm serve", "dflash generate transformers"):
        assert command in card


def test_the_newest_checkpoint_is_measured_despite_pruning(
    make_run: MakeRun, demo_assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heldout = {"heldout": [str(demo_assets / "heldout.jsonl")]}
    file = make_run("run", data=heldout, evaluate=FEW, train={"max_steps": 4}, checkpoint={"every_steps": 2})
    assert main(["train", str(file)]) == 0
    run_dir, settings = run_dir_of(file), load_settings(file)
    taps = read_run_facts(run_dir)["drafter"]["taps"]
    stage = EvaluatorStage(settings.target, settings.data, settings.evaluate, run_dir, taps)
    (found,) = stage.handle(EvalRequest())
    assert found.step == 4 and found.report["num_prompts"] == 2 and found.report["lossless"] is None

    load, asked = checkpoints.load_drafter, []

    def pruned_once(folder: Path, step: int):
        asked.append(step)
        if len(asked) == 1:
            raise CheckpointError("gone")
        return load(folder, step)

    newest = iter([2, 4, 4])
    monkeypatch.setattr(checkpoints, "load_drafter", pruned_once)
    monkeypatch.setattr(checkpoints, "newest_step", lambda _: next(newest))
    (again,) = stage.handle(EvalRequest())
    assert asked == [2, 4] and again.step == 4 and again.report["rows"] == found.report["rows"]
    monkeypatch.setattr(checkpoints, "newest_step", lambda _: 4)
    asked.clear()
    with pytest.raises(CheckpointError, match="gone"):
        list(stage.handle(EvalRequest()))


@pytest.mark.parametrize("damage", ["unwritable", "unreadable"])
def test_a_resumed_run_measures_its_checkpoint_first(make_run: MakeRun, demo_assets: Path, damage: str) -> None:
    heldout = {"heldout": [str(demo_assets / "heldout.jsonl")]}
    file = make_run("run", data=heldout, evaluate=FEW, train={"max_steps": 4}, checkpoint={"every_steps": 2})
    assert main(["train", str(file)]) == 0
    run_dir = run_dir_of(file)
    before = weights(run_dir, 4)
    shutil.rmtree(checkpoints.checkpoint_path(run_dir, 4))
    if damage == "unwritable":
        (run_dir / "evaluation.json").mkdir()
    else:
        (run_dir / "evaluation.json").write_text("{", encoding="utf-8")
    assert main(["train", str(run_dir), "--evaluate.device", "cpu"]) == 0
    assert events(run_dir, "decoded")[-1]["step"] == 4
    warnings = [entry["text"] for entry in events(run_dir, "warning")]
    assert warnings and all("evaluation.json: " in text for text in warnings)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(run_dir, 4).items())


@pytest.fixture
def slow_run(make_run: MakeRun, demo_assets: Path, tmp_path: Path):
    """A function: changes → a training process whose evaluator has work for longer than the run takes."""
    started: list[subprocess.Popen] = []

    def start(**evaluate) -> tuple[subprocess.Popen, Path, Path]:
        settings = make_run(
            "slow",
            data={"heldout": [str(demo_assets / "heldout.jsonl")]},
            evaluate={"device": "cpu", "num_prompts": 40, "max_new_tokens": 500, "validation_samples": 0, **evaluate},
            train={"max_steps": 20},
            checkpoint={"every_steps": 5},
            observe={"console": "plain"},
        )
        log = tmp_path / "log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("w") as file:
            command = [sys.executable, "-m", "paceline", "train", str(settings)]
            started.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment))
        return started[-1], run_dir_of(settings), log

    yield start
    for process in started:
        process.kill()
        process.wait()


def evaluator_of(process: subprocess.Popen, log: Path, run_dir: Path) -> int:
    """The evaluator: the only process that is 10 more nice than the tests."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        for pid in children_of(process.pid):
            try:
                nice = int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[16])
            except OSError:
                continue
            if nice == min(os.nice(0) + 10, 19):
                return pid
        time.sleep(0.02)
    raise AssertionError(log.read_text())


def gone_within(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a process outlives the run"
        time.sleep(0.05)


def test_training_goes_on_without_an_evaluator_that_was_killed(slow_run) -> None:
    process, run_dir, log = slow_run()
    os.kill(evaluator_of(process, log, run_dir), signal.SIGKILL)
    assert process.wait(200) == 0, log.read_text()
    shown = log.read_text()
    assert shown.count("the evaluator was killed by SIGKILL; training continues without real decoding") == 1
    assert "Traceback" not in shown and checkpoints.newest_step(run_dir) == 20
    warnings = [entry["text"] for entry in events(run_dir, "warning")]
    assert warnings.count("the evaluator was killed by SIGKILL; training continues without real decoding") == 1


def test_the_end_waits_within_its_bound_and_leaves_no_process(slow_run) -> None:
    process, run_dir, log = slow_run(wait_s=0.5)
    evaluator = evaluator_of(process, log, run_dir)
    everyone = children_of(process.pid)
    assert evaluator in everyone
    assert process.wait(200) == 0, log.read_text()
    assert re.search(r"not decoded within evaluate.wait_s = 0.5; make up for it", log.read_text())
    assert checkpoints.newest_step(run_dir) == 20
    gone_within(everyone, 10)


def test_nothing_outlives_a_trainer_that_was_killed(slow_run) -> None:
    process, run_dir, log = slow_run()
    evaluator = evaluator_of(process, log, run_dir)
    everyone = children_of(process.pid)
    assert evaluator in everyone
    process.kill()
    process.wait()
    gone_within(everyone, 20)


def test_an_evaluator_that_cannot_start_costs_a_warning(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "no chat"}\n', encoding="utf-8")
    settings = make_run(
        "odd",
        data={"heldout": [str(tmp_path / "text.jsonl")], "store": str(tmp_path / "store")},
        evaluate={**FEW, "validation_samples": 0, "device": "cpu"},
        train={"max_steps": 3},
    )
    assert main(["train", str(settings)]) == 0
    (warning,) = [entry["text"] for entry in events(run_dir_of(settings), "warning")]
    assert warning.startswith("the evaluator failed: ") and "no row with a question to evaluate" in warning


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"evaluate": {"device": "cpu"}}, "there are no held-out prompts to decode"),
        ({"evaluate": {"device": "cuda:77"}}, "evaluate.device: cuda:77: this machine has no CUDA device"),
        ({"checkpoint": {"keep_best": "decode/tau"}}, "is measured by the evaluator alone"),
    ],
)
def test_errors_are_one_line(make_run: MakeRun, capsys: pytest.CaptureFixture[str], changes, says) -> None:
    assert main(["train", str(make_run(data={"store": None}, **changes))]) == 2
    shown = capsys.readouterr().err
    assert says in shown and shown.count("error:") == 1
