"""Errors by real means in a real run: each ends it in seconds with one line, leaves nothing, and the run goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from paceline.checkpoint import checkpoints
from paceline.cli import main
from paceline.data.store import open_store
from processes import children_of

MakeRun = Callable[..., Path]
LONG = {"epochs": 200, "max_steps": 2000}
BATCH = r"batch \d+ of epoch \d+ \(samples [\d, ]+(and \d+ more)?\)"
WORK = rf"({BATCH}|optimizer step \d+|checkpoint of step \d+|nothing)"


def run_dir_of(settings: Path) -> Path:
    return Path(yaml.safe_load(settings.read_text())["run_dir"])


def workers_of(pid: int) -> list[int]:
    """Target worker and drafter, in the order in which they were started: forked last."""
    return sorted(child for child in children_of(pid) if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes())[
        -2:
    ]


def wait_until(happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happened()


def shared_memory() -> set[str]:
    mine = {os.getpid(), *children_of(os.getpid())}
    return {path.name for path in Path("/dev/shm").iterdir() if any(str(pid) in path.name for pid in mine)}


@contextmanager
def striking(settings: Path, number: int, blow: signal.Signals) -> Generator[None, None, None]:
    """Once the run has a checkpoint, a worker of this process is sent a signal: 0 is the target, 1 the drafter."""

    def strike() -> None:
        if wait_until(lambda: checkpoints.newest_step(run_dir_of(settings)) > 0):
            os.kill(workers_of(os.getpid())[number], blow)

    thread = threading.Thread(target=strike)
    thread.start()
    yield
    thread.join()


def error_line(text: str) -> str:
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, text
    return lines[0]


def goes_on(settings: Path) -> None:
    """The same run, a few steps further."""
    text = yaml.safe_load(settings.read_text())
    reached = checkpoints.newest_step(run_dir_of(settings))
    stop = threading.Thread(
        target=lambda: (
            wait_until(lambda: checkpoints.newest_step(run_dir_of(settings)) > reached)
            and os.kill(os.getpid(), signal.SIGINT)
        )
    )
    stop.start()
    assert main(["train", text["run_dir"]]) == 0
    stop.join()
    assert checkpoints.newest_step(run_dir_of(settings)) > reached


@pytest.mark.slow
@pytest.mark.parametrize(("number", "stage"), [(0, "target"), (1, "drafter")])
def test_a_killed_worker_is_named_and_the_run_goes_on(make_run: MakeRun, capfd, number: int, stage: str) -> None:
    settings, before = make_run(flow={"mode": "pipeline"}, train=LONG, checkpoint={"every_steps": 5}), shared_memory()
    with striking(settings, number, signal.SIGKILL):
        assert main(["train", str(settings)]) == 1
    line = error_line(capfd.readouterr().err)
    assert re.search(rf"stage {stage} 0 \(cpu\) was killed by SIGKILL while working on {WORK}", line), line
    assert not workers_alive()
    assert shared_memory() <= before
    goes_on(settings)


def workers_alive() -> list[int]:
    """Processes of this one that are paceline's workers: the fork server and the resource tracker stay."""
    return [
        child
        for child in children_of(os.getpid())
        if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes() and os.getpid() != parent_of(child)
    ]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "stage"), [(0, "target"), (1, "drafter")])
def test_a_worker_that_hangs_is_named_with_what_it_was_doing(make_run: MakeRun, capfd, number: int, stage: str) -> None:
    flow = {"mode": "pipeline", "stall_limit_s": 20.0}
    settings = make_run(flow=flow, train=LONG, checkpoint={"every_steps": 5})
    with striking(settings, number, signal.SIGSTOP):
        assert main(["train", str(settings)]) == 1
    line = error_line(capfd.readouterr().err)
    assert re.search(
        rf"stage {stage} 0 \(cpu\) has shown no progress for 2\d s while working on {WORK}; the limit is flow", line
    ), line
    assert not workers_alive()


def damaged_target(folder: Path, target: Path, token: int) -> Path:
    """A copy of the target whose embedding of one token is not a number."""
    shutil.copytree(target, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("embed_tokens.weight"))
    weights[name][token] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_features_that_are_not_finite_name_their_samples(
    make_run: MakeRun, demo_assets: Path, tmp_path: Path, capfd
) -> None:
    flow = {"mode": "pipeline"}
    sound = make_run("sound", train={"max_steps": 1})
    assert main(["train", str(sound)]) == 0
    rows = open_store(yaml.safe_load(sound.read_text())["data"]["store"])
    holders: dict[int, set[int]] = {}
    for row in range(len(rows.lengths)):
        for token in np.unique(rows.read([row])[0][0]):
            holders.setdefault(int(token), set()).add(row)
    token, (sample,) = next((token, rows) for token, rows in holders.items() if len(rows) == 1)
    capfd.readouterr()
    path = damaged_target(tmp_path / "target", demo_assets / "target", token)
    settings = make_run("nan", target={"path": str(path)}, flow=flow, data={"store": str(tmp_path / "own")}, train=LONG)
    assert main(["train", str(settings)]) == 1
    line = error_line(capfd.readouterr().err)
    assert re.search(rf"stage target 0 \(cpu\) failed on .*{BATCH}: features of \d+ tokens of samples", line), line
    assert f"samples [{sample}] are not finite" in line


def test_a_damaged_row_is_named_and_the_fixed_run_resumes(make_run: MakeRun, tmp_path: Path, capfd) -> None:
    flow, data = {"mode": "pipeline"}, {"store": str(tmp_path / "own")}
    assert main(["train", str(make_run("first", flow=flow, data=data, train={"max_steps": 1}))]) == 0
    tokens = open_store(tmp_path / "own").read([41])[0][0].astype(np.int32).tobytes()
    part = next((tmp_path / "own").glob("part-*.arrow"))
    sound = part.read_bytes()
    assert sound.count(tokens) == 1
    part.write_bytes(sound.replace(tokens, tokens[:-4] + b"\x7f\x7f\x7f\x7f"))
    capfd.readouterr()
    fresh = make_run("fresh", flow=flow, data=data, train={"max_steps": 30})
    assert main(["train", str(fresh)]) == 1
    line = error_line(capfd.readouterr().err)
    assert "part-000000.arrow: damaged: its bytes are not those that were written" in line
    assert main(["train", str(fresh), "--data.verify", "false"]) == 1
    line = error_line(capfd.readouterr().err)
    assert re.search(rf"stage target 0 \(cpu\) failed on .*{BATCH}: .*token id 2139062143 is outside", line), line
    part.write_bytes(sound)
    assert main(["train", str(fresh)]) == 0
    assert checkpoints.newest_step(run_dir_of(fresh)) == 30


def test_too_small_shared_memory_is_refused_early(make_run: MakeRun, capfd) -> None:
    free = shutil.disk_usage("/dev/shm").free
    buffer = 3 * 128 * 4 * 100
    settings = make_run(flow={"mode": "pipeline", "pool_buffers": free // buffer + 1000})
    began = time.monotonic()
    assert main(["train", str(settings)]) == 1
    assert re.search(
        r"shared memory: \d+ feature buffers need \d+ MiB, /dev/shm has", error_line(capfd.readouterr().err)
    )
    assert time.monotonic() - began < 120
    assert not workers_alive()


def test_a_pool_that_holds_no_two_buffers_is_refused(make_run: MakeRun, capfd) -> None:
    assert main(["train", str(make_run(flow={"mode": "pipeline", "pool_bytes": 100_000}))]) == 2
    assert re.search(r"flow.pool_bytes: 100000 hold no 2 buffers of \d+ bytes", error_line(capfd.readouterr().err))


@pytest.mark.slow
def test_sigterm_checkpoints_and_a_second_ends_at_once(make_run: MakeRun, tmp_path: Path) -> None:
    settings, log = make_run(flow={"mode": "pipeline"}, train=LONG, checkpoint={"every_steps": 5}), tmp_path / "log"
    command = [sys.executable, "-m", "paceline", "train", str(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for blows, code in ((1, 0), (2, 130)):
        reached = checkpoints.newest_step(run_dir_of(settings))
        with log.open("w") as file:
            run = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        assert wait_until(lambda reached=reached: checkpoints.newest_step(run_dir_of(settings)) > reached), (
            log.read_text()
        )
        family = children_of(run.pid)
        if blows == 2:
            # A worker that stands still: the orderly stop cannot come to its end.
            os.kill(workers_of(run.pid)[1], signal.SIGSTOP)
        for _ in range(blows):
            os.killpg(run.pid, signal.SIGTERM)
            time.sleep(1.0)
        assert run.wait(60) == code, log.read_text()
        assert "Traceback" not in log.read_text()
        assert wait_until(lambda family=family: not any(Path(f"/proc/{pid}").exists() for pid in family)), "orphans"


def test_bf16_and_fp8_transport_train_and_tell_their_error(make_run: MakeRun) -> None:
    losses = {}
    for transport in ("exact", "bf16", "fp8"):
        settings = make_run(transport, flow={"mode": "pipeline", "transport": transport}, train={"max_steps": 3})
        assert main(["train", str(settings)]) == 0
        text = (run_dir_of(settings) / "metrics.jsonl").read_text()
        told = re.findall(r"relative RMS error of ([\d.e-]+)", text)
        assert len(told) == (0 if transport == "exact" else 1)
        assert not told or 1e-4 < float(told[0]) < 0.05
        losses[transport] = load_file(checkpoints.checkpoint_path(run_dir_of(settings), 3) / checkpoints.WEIGHTS)
    name = next(iter(losses["exact"]))
    assert not torch.equal(losses["exact"][name], losses["bf16"][name])
    assert torch.allclose(losses["exact"][name], losses["fp8"][name], atol=5e-2)
