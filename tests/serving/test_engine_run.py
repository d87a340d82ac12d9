"""A run whose target vLLM runs: the same drafter as with transformers, and what a user sees when vLLM fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.check.context import CheckContext, CheckLimits
from paceline.check.model_checks import check_taps
from paceline.checkpoint.checkpoints import steps
from paceline.cli import main
from paceline.config import load_settings
from paceline.target_model.vllm_side.paceline_memory import shared_files
from small_runs import MakeRun

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]


@pytest.fixture
def vllm_settings(programs: Path) -> dict[str, Any]:
    """Settings of a run that is trained with vLLM."""
    return {
        "target": {"engine": "vllm", "vllm_environment": str(programs.parent), "vllm": {"max_num_batched_tokens": 512}},
        "flow": {"mode": "pipeline"},
    }


def _losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["values"]["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("prove", [True, False], ids=["proved", "teacher, not proved"])
def test_both_engines_train_the_same_drafter(make_run: MakeRun, vllm_settings: dict[str, Any], prove: bool) -> None:
    objective = {"terms": {"ce": 1.0} if prove else {"ce": 0.5, "kl": 0.5}}
    vllm_settings["target"]["prove_engine"] = prove
    plain, other = make_run("plain", objective=objective), make_run("engine", objective=objective, **vllm_settings)
    assert main(["train", str(plain)]) == 0
    assert main(["train", str(other)]) == 0
    run_dir = other.with_suffix("")
    ours, theirs = _losses(plain.with_suffix("")), _losses(run_dir)
    assert len(ours) == len(theirs) == 30
    assert theirs == pytest.approx(ours, rel=2e-3)
    assert json.loads((run_dir / "run.json").read_text())["engine"].startswith("vllm 0.")


def _processes(of: int) -> list[int]:
    """Processes of a session, by the number of the process that leads it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == of and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def _engine_of(run: subprocess.Popen[str]) -> int:
    """The process that leads a run's engine, once it has answered a batch."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            session = (folder / "environ").read_bytes()
        except OSError:
            continue
        if any(word.endswith(b"paceline_engine.py") for word in words) and f"RUN_OF={os.getpid()}".encode() in session:
            return int(folder.name)
    raise AssertionError("no engine runs")


def _wait_for(condition: Callable[[], bool], run: subprocess.Popen[str], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert run.poll() is None and time.monotonic() < deadline, "the run ended, or took too long"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [(signal.SIGKILL, "vLLM "), (signal.SIGSTOP, "vLLM made no step for 5 s")],
    ids=["killed", "stopped"],
)
def test_a_lost_engine_is_named_and_resumed(
    make_run: MakeRun, vllm_settings: dict[str, Any], kind: signal.Signals, said: str
) -> None:
    vllm_settings["target"]["vllm_patience_s"] = 5
    settings = make_run("lost", **vllm_settings, train={"max_steps": 400}, checkpoint={"every_steps": 5})
    run_dir = settings.with_suffix("")
    words = [sys.executable, "-m", "paceline", "train", str(settings)]
    variables = {**os.environ, "RUN_OF": str(os.getpid())}
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        _wait_for(lambda: bool(steps(run_dir)), run, 300)
        leader = _engine_of(run)
        shared = shared_files(leader)
        for process in _processes(leader):
            os.kill(process, kind)
        began = time.monotonic()
        output, _ = run.communicate(timeout=60)
        took = time.monotonic() - began
    assert run.returncode == 1 and took < 30
    assert said in output and "target 0 (cpu)" in output and "Traceback" not in output
    assert _processes(leader) == []
    assert shared and not any(path.exists() for path in shared)
    more = max(steps(run_dir)) + 2
    assert main(["train", str(settings), "--train.max_steps", str(more), "--yes"]) == 0
    assert max(steps(run_dir)) == more


def test_check_proves_the_engine(make_run: MakeRun, vllm_settings: dict[str, Any]) -> None:
    settings = load_settings(make_run("checked", **vllm_settings))
    context = CheckContext(settings, Path(settings.run_dir).parent, CheckLimits(rows=16))
    found = check_taps(context)
    assert "differs from transformers by" in found.detail
    assert len(found.figures["engine_errors"]) == 3 and max(found.figures["engine_errors"]) < 1e-4
