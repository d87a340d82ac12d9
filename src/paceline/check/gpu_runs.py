"""Stages B and D of the acceptance of a device: whole runs of the demo from the command line."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from paceline.check.gpu_bench import Bench, Check, skipped, verdict
from paceline.check.results import CheckResult
from paceline.checkpoint.checkpoints import WEIGHTS, checkpoint_path, newest_step
from paceline.errors import StageError

LIMIT_S = 900.0
"""Longest time of one run."""


def steps_of(bench: Bench) -> int:
    """Optimizer steps of a run."""
    return 12 if bench.tiny else 60


def command_of(bench: Bench, name: str, **flags: Any) -> list[str]:
    """The command line of a run in the scratch folder; all runs share one store."""
    base = {
        "data.store": str(bench.folder / "store"),
        "train.max_steps": steps_of(bench),
        "flow.mode": "inline",
        "flow.delivery": "ordered",
        "flow.share_devices": "true",
        "train.deterministic": "true",
        "checkpoint.every_steps": max(2, steps_of(bench) // 4),
        "observe.console": "quiet",
    }
    settings = bench.settings(bench.device)
    path = bench.folder / f"{name}.yaml"
    if not path.exists():
        values = settings.model_dump(mode="json", exclude_unset=True)
        path.write_text(json.dumps({**values, "run_dir": str(bench.folder / name)}), encoding="utf-8")
    words = [f"--{key}={value}" for key, value in {**base, **flags}.items()]
    return [sys.executable, "-m", "paceline", "train", str(path), *words]


def run(bench: Bench, name: str, **flags: Any) -> Path:
    """Trains in a separate process; gives the run directory.

    Raises:
        StageError: it failed; the end of what it said.
    """
    done = subprocess.run(
        command_of(bench, name, **flags), capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    if done.returncode:
        raise StageError(f"run {name} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return bench.folder / name


def weights_hash(run_dir: Path) -> str:
    """Hash of the newest checkpoint's weights."""
    found = hashlib.sha256()
    state = load_file(checkpoint_path(run_dir, newest_step(run_dir)) / WEIGHTS)
    for name in sorted(state):
        found.update(name.encode() + state[name].numpy().tobytes())
    return found.hexdigest()[:16]


def values_of(run_dir: Path) -> list[dict[str, Any]]:
    """The values of each line of steps in a run's metrics."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["values"] for line in map(json.loads, lines) if "values" in line and "step" in line]


def modes(bench: Bench) -> CheckResult:
    """Inline and pipeline with ordered delivery end with the same weights."""
    one, other = run(bench, "inline"), run(bench, "pipeline", **{"flow.mode": "pipeline"})
    same = weights_hash(one) == weights_hash(other)
    advice = "the claim of equal weights does not hold on this device"
    return verdict("modes", same, "equal bit for bit" if same else "weights differ", advice)


def resume(bench: Bench) -> CheckResult:
    """A run that is killed and started again ends with the weights of one that was left alone."""
    whole, killed = weights_hash(run(bench, "inline")), 0
    for _ in range(1 if bench.tiny else 3):
        process = subprocess.Popen(
            command_of(bench, "killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        began, before = time.monotonic(), newest_step(bench.folder / "killed")
        while process.poll() is None and newest_step(bench.folder / "killed") == before:
            if time.monotonic() - began > LIMIT_S:
                break
            time.sleep(0.05)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.wait()
    same = weights_hash(run(bench, "killed")) == whole
    detail = f"{killed} kills; " + ("equal bit for bit" if same else "weights differ")
    return verdict("resume", same and killed > 0, detail, "resuming is not exact on this device")


def decoding(bench: Bench) -> CheckResult:
    """The trained drafter decodes without a difference from the target alone."""
    words = [
        sys.executable,
        "-m",
        "paceline",
        "evaluate",
        str(run(bench, "inline")),
        "--device",
        bench.device,
        "--json",
    ]
    figures, wrong = {}, []
    for dtype in ("float32", "bfloat16", "float64") if bench.is_cuda else ("float64",):
        flags = [f"--evaluate.dtype={dtype}", "--evaluate.num_prompts=6", "--evaluate.max_new_tokens=32"]
        done = subprocess.run([*words, *flags], capture_output=True, text=True, check=False, timeout=LIMIT_S)
        if done.returncode:
            wrong.append(f"{dtype}: {done.stderr.strip()[-200:]}")
            continue
        report = next(iter(json.loads(done.stdout).values()))
        figures[dtype] = report["tau_micro"]
        if report["lossless"]["errors"]:
            wrong.append(f"{dtype}: {report['lossless']['errors']} answers differ")
    detail = "; ".join([*(f"τ {tau:.2f} in {name}" for name, tau in figures.items()), *wrong])
    return verdict("decoding", not wrong, detail, "do not serve from this device before it is known why", figures)


def gauges(bench: Bench) -> CheckResult:
    """Every worker reports the memory of its own card."""
    if not bench.is_cuda:
        return skipped("gauges", "only a card has its own memory")
    found: dict[str, float] = {}
    for values in values_of(run(bench, "pipeline", **{"flow.mode": "pipeline"})):
        found |= {name: value for name, value in values.items() if name.endswith("_gpu_bytes")}
    expected = {f"memory_peak/{worker}_gpu_bytes" for worker in ("target_0", "drafter_0")}
    passed = expected <= found.keys() and all(value > 0 for value in found.values())
    detail = ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in found.items()) or "no gauge was logged"
    return verdict("gauges", passed, detail, "memory is read from another card", found)


def speeds(bench: Bench) -> CheckResult:
    """Pipeline against inline: the best step's real tokens per second."""
    rates = {}
    for mode in ("inline", "pipeline"):
        values = values_of(run(bench, f"speed-{mode}", **{"flow.mode": mode, "flow.delivery": "ready"}))
        rates[mode] = max(line.get("real_tokens_per_s", 0.0) for line in values)
    ratio = rates["pipeline"] / rates["inline"] if rates["inline"] else 0.0
    detail = ", ".join(f"{mode} {rate:,.0f} tokens/s" for mode, rate in rates.items()) + f"; ratio {ratio:.2f}"
    if bench.tiny:
        return verdict("speeds", all(rates.values()), detail, "no speed was logged", {"ratio": ratio, **rates})
    return verdict("speeds", ratio >= 0.95, detail, "use flow.mode: inline on one card", {"ratio": ratio, **rates})


RUNS: dict[str, Check] = {"modes": modes, "resume": resume, "decoding": decoding, "gauges": gauges}
"""Stage B."""
PIPELINE: dict[str, Check] = {"speeds": speeds}
"""Stage D."""
