"""A small run that is steered, forked, moved and compared, on the embedded target; prints what was lost or doubled.

    python scripts/steering.py [FOLDER]      # a few minutes on a CPU; FOLDER keeps the runs and the report

The run trains 30 steps, then goes on from the middle of its first epoch with another plan, more epochs, half the
learning rate and noise. From step 45 it is forked with another objective, and from step 60 on other chats. What they
left in their directories is then counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from paceline.checkpoint.run_directory import read_run_facts
from paceline.cli import main
from paceline.config import load_settings
from paceline.run.build import build_run, resolve_models
from paceline.run.run import Run

ASSETS = Path(__file__).resolve().parent.parent / "src" / "paceline" / "assets" / "demo"
FIRST, TOTAL, FORK = 30, 90, 45


def settings_of(folder: Path) -> dict[str, Any]:
    """Settings of the first run."""
    return {
        "run_dir": str(folder / "first"),
        "target": {"path": str(ASSETS / "target"), "dtype": "float32", "num_taps": 3},
        "data": {"train": [str(folder / "chats.jsonl")], "max_length": 512},
        "plan": {"strategy": "shuffled", "schedule": "shuffled", "token_budget": 1024, "accumulate": 2},
        "drafter": {"num_layers": 2, "block_size": 8, "num_anchors": 32, "dtype": "float32"},
        "optimizer": {"lr": 2e-3, "warmup": 0.02},
        "train": {"epochs": 1},
        "flow": {"mode": "inline", "delivery": "ordered"},
        "checkpoint": {"every_steps": 15, "keep_last": 99},
        "observe": {"console": "quiet"},
    }


def paceline(*words: str) -> None:
    """One command of the command line; ends the script where that fails."""
    print("$ paceline", *words, flush=True)
    if main(list(words)) != 0:
        raise SystemExit(f"paceline {words[0]} failed")


def built(run_dir: Path) -> Run:
    """The run of a directory."""
    settings = load_settings(run_dir / "settings.yaml")
    return build_run(settings, resolve_models(settings))


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of optimizer steps in metrics.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def losses_of(run_dir: Path) -> dict[int, float]:
    """Loss by optimizer step."""
    return {line["step"]: line["values"]["loss"] for line in steps_of(run_dir)}


def coverage(run: Run) -> str:
    """How often the samples of the first epoch were trained, by the micro-batches that the steps' lines name."""
    lines = steps_of(run.run_dir)
    steps = [line["step"] for line in lines]
    counts: Counter[int] = Counter()
    for line in lines:
        for batch in line["batches"] if line["epoch"] == 0 else ():
            counts.update(run.plan.epoch(0).batch(batch).rows.tolist())
    usable = np.flatnonzero(np.asarray(run.source.eligible)).tolist()
    lost, doubled = sum(counts[row] == 0 for row in usable), sum(count > 1 for count in counts.values())
    return (
        f"epoch 1: {len(usable)} samples, {lost} lost, {doubled} doubled; {len(steps)} steps, "
        f"{len(steps) - len(set(steps))} of them twice"
    )


def jump(losses: dict[int, float], step: int, width: int = 8) -> str:
    """Mean loss of the steps before and after one."""
    before = np.mean([losses[s] for s in range(step - width + 1, step + 1)])
    after = np.mean([losses[s] for s in range(step + 1, step + width + 1)])
    return f"mean loss of the {width} steps before and after step {step}: {before:.3f}, {after:.3f}"


def steer(folder: Path) -> None:
    """All of it."""
    chats = (ASSETS / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "chats.jsonl").write_text("\n".join(chats[:400]) + "\n", encoding="utf-8")
    (folder / "others.jsonl").write_text("\n".join(chats[400:700]) + "\n", encoding="utf-8")
    settings, first = folder / "first.yaml", folder / "first"
    settings.write_text(yaml.safe_dump(settings_of(folder)))
    paceline("train", str(settings), "--train.max_steps", str(FIRST))
    steered = [
        "--plan.strategy",
        "grid",
        "--plan.schedule",
        "stratified",
        "--plan.accumulate",
        "3",
        "--train.epochs",
        "3",
    ]
    steered += ["--optimizer.lr", "1e-3", "--drafter.noise.kind", "gaussian", "--drafter.noise.ratio", "0.05"]
    paceline("train", str(first), *steered, "--train.max_steps", str(TOTAL), "--yes")
    gentle, others = folder / "gentle", folder / "others"
    paceline("fork", str(first), "--step", str(FORK), "--out", str(gentle), "--objective.gamma", "2")
    paceline("train", str(gentle))
    words = ["--step", "60", "--out", str(others), "--data.train", f"[{folder / 'others.jsonl'}]"]
    paceline("fork", str(first), *words, "--train.max_steps", "80")
    paceline("train", str(others))
    paceline("report", str(first), str(gentle), "--out", str(folder / "comparison.html"))
    run, losses = built(first), losses_of(first)
    of_epoch = sum(planned.epoch == 0 for planned in run.plan.steps)
    print(f"first: steered after step {FIRST}, epoch 1 ends with step {of_epoch}")
    print(f"first: {coverage(run)}")
    print(f"first: {jump(losses, FIRST)}")
    forked = losses_of(gentle)
    same = all(losses[step] == forked[step] for step in range(1, FORK + 1))
    print(f"gentle: {coverage(built(gentle))}; losses up to step {FORK} equal those of first: {same}")
    print(f"gentle: {jump(forked, FORK)}")
    facts, moved = read_run_facts(others), losses_of(others)
    last_before, first_after = losses[60], moved[61]
    print(f"others: begins {facts['begins']}; loss of step 60 of first {last_before:.3f}, of step 61 {first_after:.3f}")
    print(f"steps: first {min(losses)} to {max(losses)}, gentle to {max(forked)}, others {min(moved)} to {max(moved)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        steer(Path(sys.argv[1]).absolute())
    else:
        with tempfile.TemporaryDirectory() as name:
            steer(Path(name))
