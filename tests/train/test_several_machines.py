"""Two pipelines on one computer, joined as two machines are: one drafter, and neither waits for the dead."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
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
from paceline.cli import main
from processes import children_of

MakeRun = Callable[..., Path]
TWO_RANKS = {"mode": "pipeline", "drafter_devices": ["cpu", "cpu"]}


def run_dir_of(settings: Path) -> Path:
    return Path(yaml.safe_load(settings.read_text())["run_dir"])


def weights(settings: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoints.checkpoint_path(run_dir_of(settings), step) / checkpoints.WEIGHTS)


def values(settings: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (run_dir_of(settings) / "metrics.jsonl").read_text().splitlines()]
    return [line["values"][name] for line in lines if line["kind"] == "step"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_machine(number: int, port: int, settings: Path, log: Path, *flags: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(number), "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "paceline", "train", str(settings), "--observe.console", "plain", *flags]
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def start_both(settings: Path, tmp_path: Path) -> tuple[list[subprocess.Popen], list[Path]]:
    port, logs = free_port(), [tmp_path / f"machine{number}.log" for number in range(2)]
    return [start_machine(number, port, settings, logs[number]) for number in range(2)], logs


def wait_for_checkpoint(machines: list[subprocess.Popen], settings: Path, step: int, logs: list[Path]) -> None:
    deadline = time.monotonic() + 240
    while checkpoints.newest_step(run_dir_of(settings)) < step:
        assert all(machine.poll() is None for machine in machines), [log.read_text() for log in logs]
        assert time.monotonic() < deadline, [log.read_text() for log in logs]
        time.sleep(0.02)


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.allclose(left[n], right[n], atol=2e-5) for n in left)


@pytest.mark.slow
def test_two_machines_learn_what_one_learns(make_run: MakeRun, tmp_path: Path) -> None:
    """2 machines × (1 target + 2 drafters), and one with 4 drafters: the same plan, so the same windows.

    The ranks' weights are compared bit for bit by the run itself at every checkpoint.
    """
    few = {"accumulate": 1}, {"max_steps": 6}, {"every_steps": 3}
    plan, train, checkpoint = few
    one = make_run("one", flow={"mode": "pipeline", "drafter_devices": ["cpu"] * 4}, plan=plan, train=train)
    assert main(["train", str(one)]) == 0
    shared = {"shard": True}  # each machine's ranks share the optimizer's state out
    two = make_run("two", flow=TWO_RANKS, plan=plan, train=train, checkpoint=checkpoint, optimizer=shared)
    machines, logs = start_both(two, tmp_path)
    assert [machine.wait(200) for machine in machines] == [0, 0], [log.read_text() for log in logs]
    assert close(weights(one, 6), weights(two, 6))
    assert "machine 1 of 2 is done at step 6" in logs[1].read_text()
    for name in ("loss", "window/real_tokens"):
        assert values(one, name) == pytest.approx(values(two, name), rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_machine_that_dies_ends_all_and_all_resume(make_run: MakeRun, tmp_path: Path, victim: int) -> None:
    settings = make_run(
        "broken",
        flow={"mode": "pipeline"},
        plan={"accumulate": 1},
        train={"max_steps": 400, "epochs": 200},
        checkpoint={"every_steps": 4},
    )
    machines, logs = start_both(settings, tmp_path)
    wait_for_checkpoint(machines, settings, 4, logs)
    families = [pid for machine in machines for pid in children_of(machine.pid)]
    machines[victim].send_signal(signal.SIGKILL)
    machines[victim].wait()
    other = machines[1 - victim]
    assert other.wait(30) == 1
    last = logs[1 - victim].read_text().strip().splitlines()[-1]
    assert re.fullmatch(rf"error: machine {victim} is gone: .*start all 2 machines again", last), last
    assert "Traceback" not in logs[1 - victim].read_text()
    assert gone(families), "orphans"
    before = checkpoints.newest_step(run_dir_of(settings))
    again, logs = start_both(settings, tmp_path)
    wait_for_checkpoint(again, settings, before + 4, logs)
    again[1].send_signal(signal.SIGTERM)
    assert [machine.wait(60) for machine in again] == [0, 0], [log.read_text() for log in logs]
    assert f"resuming after step {before}" in logs[0].read_text()
    stopped = checkpoints.newest_step(run_dir_of(settings))
    assert f"stopped at step {stopped} of 400, checkpoint written" in logs[0].read_text()
    assert f"machine 1 of 2 is done at step {stopped}" in logs[1].read_text()


def test_going_on_with_fewer_ranks_keeps_the_windows(make_run: MakeRun) -> None:
    settings = make_run(
        flow=TWO_RANKS, plan={"accumulate": 1}, train={"max_steps": 6}, checkpoint={"every_steps": 3}, seed=3
    )
    assert main(["train", str(settings)]) == 0
    whole, losses = weights(settings, 6), values(settings, "loss")
    shutil.rmtree(checkpoints.checkpoint_path(run_dir_of(settings), 6))
    assert main(["train", str(run_dir_of(settings)), "--flow.drafter-devices", "[cpu]"]) == 0
    assert close(whole, weights(settings, 6))
    assert values(settings, "loss") == pytest.approx(losses, rel=1e-5)


def test_machines_with_other_settings_are_refused_early(make_run: MakeRun, tmp_path: Path) -> None:
    settings, port = make_run("uneven", flow={"mode": "pipeline"}), free_port()
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    machines = [
        start_machine(0, port, settings, logs[0]),
        start_machine(1, port, settings, logs[1], "--optimizer.lr", "0.5"),
    ]
    assert [machine.wait(120) for machine in machines] == [2, 2], [log.read_text() for log in logs]
    for log in logs:
        line = log.read_text().strip().splitlines()[-1]
        assert line.startswith("error: machine 1: optimizer.lr is 0.5, machine 0 has 0.")
    assert not checkpoints.steps(run_dir_of(settings))
