"""The golden set: what the code gives today, as hashes and numbers, to hold a refactoring against.

    python scripts/golden.py make [--only PART ...]      # writes tests/golden/golden.json and help/COMMAND.txt
    python scripts/golden.py compare [--only PART ...]   # makes it again, prints a line per difference, exit code 1
    python scripts/golden.py names                       # writes tests/golden/test_names.txt

Everything goes through the command line and the files that it writes, so the script survives renamed modules. It runs
the `src` beside it, whatever is installed, with the packages of this Python. Parts:

- weights: tensors of the newest checkpoint after 60 steps of the demo; two seeds, inline and pipeline, ordered
- plan: every strategy with every schedule on three files of lengths: fingerprint, batches, efficiency, the forecast
- store: fingerprint, manifest and Arrow files of the demo's data
- metrics: every line of a 20-step inline run
- evaluate: six held-out prompts by the first run of `weights`: chain, tree, sampled
- export: tensors and configuration of both formats, from the same run
- help: what every command says of itself

Not in it: times, speeds, memory, shares of a stage's time, queues, versions, folders, when a file was made, the bytes
of `state.pt`, and warnings among the events, since some are about speed. Numbers have six significant digits. Hashes
of weights hold on one kind of processor with one version of torch: make the set again before comparing elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PROJECT = Path(__file__).resolve().parent.parent
SOURCE = PROJECT / "src"
DEMO = next(SOURCE.rglob("chats.jsonl")).parent
FOLDER = PROJECT / "tests" / "golden"
GOLDEN = FOLDER / "golden.json"

STEPS, FEW_STEPS = 60, 20
STRATEGIES = ("grid", "sorted", "shuffled", "jittered", "windowed", "bucketed", "mixed", "packed")
SCHEDULES = ("stratified", "proportional", "diverse", "round_robin", "shuffled", "curriculum")
FORMATS = ("zlab", "speculators")
COMMANDS = ("demo", "prepare", "regenerate", "plan", "check", "train", "evaluate", "export", "report")

OF_THE_MACHINE = re.compile(r"(speed|stage|queue|memory|memory_peak)/.*|.*_per_s|.*seconds.*|.*time_left.*")
"""Metrics and figures that another run of the same code gives otherwise."""
NOT_KEPT = {"time", "versions", "platform", "memory", "seconds", "speculators_version", "transformers_version"}
"""Keys of JSON that say when, where and with what it was made."""

SETTINGS = """\
run_dir: {folder}/{name}
seed: {seed}
target: {{path: {demo}/target, dtype: float32, num_taps: 4}}
data:
  train: [{demo}/chats.jsonl]
  heldout: [{demo}/heldout.jsonl]
  store: {folder}/store
  max_length: 1024
plan: {{token_budget: 1024, max_samples: 16, width_multiple: 16, accumulate: 2}}
drafter: {{num_layers: 2, block_size: 8, num_anchors: 32, dtype: float32}}
optimizer: {{name: muon, lr: 0.01, clip_norm: 5.0}}
train: {{epochs: 5, max_steps: {steps}}}
flow: {{mode: {mode}, delivery: ordered, threads: 1}}
checkpoint: {{every_steps: 50}}
evaluate: {{num_prompts: 6, max_new_tokens: 80, dtype: float64}}
"""
"""The demo's, written out."""

IN_ONE_PROCESS = """
import contextlib, io, json, runpy, sys
for words in json.load(sys.stdin):
    out, error, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["paceline", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            runpy.run_module("paceline", run_name="__main__")
        except SystemExit as leaving:
            code = leaving.code
    print(json.dumps([code, out.getvalue(), error.getvalue()]))
"""
"""As `python -m paceline` many times, without starting Python and importing as often."""


def environment() -> dict[str, str]:
    """This one, with the source beside this script, one thread, no colour and no network."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    shown = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    fixed = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    return {**kept, **shown, **fixed}


def python(*words: str, given: str = "") -> str:
    """Standard output of this Python.

    Raises:
        RuntimeError: it failed; its standard error.
    """
    done = subprocess.run(
        [sys.executable, *words], input=given, capture_output=True, text=True, check=False, env=environment()
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)[:300]}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def paceline(*words: str) -> str:
    """Standard output of a command; fails as `python` does."""
    return python("-m", "paceline", *words)


def digest(content: str | bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def digest_json(value: Any) -> str:
    """SHA-256 of plain values, whatever the order of their keys."""
    return digest(json.dumps(value, sort_keys=True))


def digest_tensors(path: Path) -> str:
    """SHA-256 of names, types, shapes and bytes in a safetensors file, by name; its metadata is left out."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), memoryview(content)[8 + size :]
    found = hashlib.sha256()
    for name in sorted(header.keys() - {"__metadata__"}):
        tensor = header[name]
        start, end = tensor["data_offsets"]
        found.update(f"{name} {tensor['dtype']} {tensor['shape']}".encode())
        found.update(data[start:end])
    return found.hexdigest()


def plain(value: Any, folder: Path) -> Any:
    """A JSON value with six digits a number, and without times, versions and what depends on the machine."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, str):
        return value.replace(str(folder), "FOLDER").replace(str(DEMO), "DEMO")
    if isinstance(value, Mapping):
        kept = {key: inner for key, inner in value.items() if key not in NOT_KEPT and not OF_THE_MACHINE.fullmatch(key)}
        return {key: plain(inner, folder) for key, inner in kept.items()}
    if isinstance(value, list):
        return [plain(inner, folder) for inner in value]
    return value


def settings(folder: Path, name: str, *, seed: int = 0, mode: str = "inline", steps: int = STEPS) -> str:
    """Path of a settings file for a run on the demo's data."""
    file = folder / f"{name}.yaml"
    file.write_text(SETTINGS.format(folder=folder, demo=DEMO, name=name, seed=seed, mode=mode, steps=steps))
    return str(file)


def prepared(folder: Path) -> Path:
    """The demo's store, made once."""
    if not (folder / "store").exists():
        paceline("prepare", settings(folder, "prepare"))
    return folder / "store"


def trained(folder: Path, *, seed: int = 0, mode: str = "inline", steps: int = STEPS) -> Path:
    """Directory of a run, trained once."""
    run = folder / f"{mode}-{seed}-{steps}"
    if not run.exists():
        prepared(folder)
        paceline("train", settings(folder, run.name, seed=seed, mode=mode, steps=steps))
    return run


def weights(folder: Path) -> dict[str, Any]:
    """Step and tensors of the newest checkpoint, by mode and seed."""
    found = {}
    for seed, mode in itertools.product((0, 1), ("inline", "pipeline")):
        newest = max((trained(folder, seed=seed, mode=mode) / "checkpoints").glob("step-*"))
        tensors = {file.name: digest_tensors(file) for file in sorted(newest.glob("*.safetensors"))}
        found[f"{mode}-{seed}"] = {"checkpoint": newest.name, **tensors}
    return found


def length_files(folder: Path) -> dict[str, Path]:
    """Real lengths, short chats, and two modes; always the same."""
    random = np.random.default_rng(7)
    with np.load(PROJECT / "benchmarks" / "data" / "lengths-902087.npz") as file:
        real = file["lengths"][:20_000]
    lengths = {
        "real": real,
        "short": np.clip(random.lognormal(4.2, 0.5, 6_000), 16, 900).astype(np.int64),
        "bimodal": random.permutation(
            np.concatenate([random.integers(40, 300, 4_000), random.integers(3_000, 6_000, 1_000)])
        ),
    }
    for name, values in lengths.items():
        np.save(folder / f"{name}.npy", values)
    return {name: folder / f"{name}.npy" for name in lengths}


def plan(folder: Path) -> dict[str, Any]:
    """Every plan, or the lines with which it is refused."""
    cases = list(itertools.product(length_files(folder).items(), STRATEGIES, SCHEDULES))
    words = [
        ["plan", str(path), "--json", "--plan.strategy", strategy, "--plan.schedule", schedule]
        for (_, path), strategy, schedule in cases
    ]
    answers = python("-c", IN_ONE_PROCESS, given=json.dumps(words)).splitlines()
    found = {}
    for ((name, _), strategy, schedule), answer in zip(cases, answers, strict=True):
        code, out, error = json.loads(answer)
        told = {"refused": plain(error.strip(), folder)} if code else plan_facts(plain(json.loads(out), folder))
        found[f"{name}/{strategy}/{schedule}"] = told
    return found


def plan_facts(forecast: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a forecast: the main figures, and the hash of all of it."""
    names = ("fingerprint", "num_batches", "num_windows", "efficiency", "repairing")
    return {**{name: forecast[name] for name in names}, "forecast": digest_json(forecast)}


def store(folder: Path) -> dict[str, Any]:
    """Manifest and files of the demo's store."""
    made = prepared(folder)
    manifest = plain(json.loads((made / "manifest.json").read_text(encoding="utf-8")), folder)
    files = {file.name: digest(file.read_bytes()) for file in sorted(made.glob("*.arrow"))}
    return {"fingerprint": manifest["fingerprint"], "files": files, "manifest": manifest}


def metrics(folder: Path) -> dict[str, Any]:
    """Header, events and steps of a short run; each figure as a list over the steps."""
    text = (trained(folder, steps=FEW_STEPS) / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [plain(json.loads(line), folder) for line in text.splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    events = [line for line in lines if line["kind"] == "event" and line["event"] != "warning"]
    return {
        "header": [line for line in lines if line["kind"] == "header"],
        "events": events,
        "place": [[line[name] for name in ("step", "steps", "epoch", "window", "batches")] for line in steps],
        "values": by_name([line["values"] for line in steps]),
        "weights": by_name([line["weights"] for line in steps]),
    }


def by_name(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Name → its value in every row; "absent" where a row has none."""
    names = sorted({name for row in rows for name in row})
    return {name: [row.get(name, "absent") for row in rows] for name in names}


def evaluate(folder: Path) -> dict[str, Any]:
    """Reports of six prompts: chain, tree, sampled; of each prompt its passes, and the hash of its text."""
    ways = {
        "chain": [],
        "tree": ["--evaluate.tree_budget", "16"],
        "sampled": ["--evaluate.temperature", "0.8", "--evaluate.seed", "3"],
    }
    run, found = trained(folder), {}
    for name, flags in ways.items():
        (report,) = json.loads(paceline("evaluate", str(run), "--json", *flags)).values()
        report = plain(report, folder)
        report["rows"] = {row["id"]: [row["accepted"], digest_json(row)] for row in report["rows"]}
        found[name] = report
    return found


def export(folder: Path) -> dict[str, Any]:
    """Tensors and configuration of both formats."""
    run, found = trained(folder), {}
    for name in FORMATS:
        out = folder / f"export-{name}"
        paceline("export", str(run), "--format", name, "--out", str(out))
        tensors = {str(file.relative_to(out)): digest_tensors(file) for file in sorted(out.rglob("*.safetensors"))}
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        found[name] = {"tensors": tensors, "config": plain(config, folder)}
    return found


def help_texts(_: Path) -> dict[str, Any]:
    """Help of the whole and of every command, by name."""
    return {"paceline": paceline("--help"), **{name: paceline(name, "--help") for name in COMMANDS}}


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "weights": weights,
    "plan": plan,
    "store": store,
    "metrics": metrics,
    "evaluate": evaluate,
    "export": export,
    "help": help_texts,
}


def made(parts: Sequence[str]) -> dict[str, Any]:
    """Some parts, made now in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        found = {part: PARTS[part](Path(folder).resolve()) for part in parts}
    return json.loads(json.dumps(found))


def write(found: dict[str, Any]) -> None:
    """Put parts on record; other parts stay as they are."""
    folder = FOLDER / "help"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in found.get("help", {}).items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    known = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    GOLDEN.write_text(laid_out({**known, **hashed(found)}) + "\n", encoding="utf-8")


def hashed(found: dict[str, Any]) -> dict[str, Any]:
    """Parts as they stand in the JSON file: help as hashes."""
    return {
        part: {name: digest(text) for name, text in values.items()} if part == "help" else values
        for part, values in found.items()
    }


def laid_out(value: Any, indent: str = "") -> str:
    """JSON with a line for each key, and lists and small mappings on one line."""
    flat = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if not isinstance(value, dict) or (indent and len(indent + flat) <= 120):
        return flat
    deeper = indent + " "
    rows = [f"{deeper}{json.dumps(key)}: {laid_out(value[key], deeper)}" for key in sorted(value)]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def differences(before: Any, after: Any, where: str) -> Iterator[str]:
    """A line for each value that is not the same."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted({*before, *after}):
            yield from differences(before.get(name, "absent"), after.get(name, "absent"), f"{where}/{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{where}/{place}")
    elif before != after:
        yield f"{where}: {str(before)[:90]!r} → {str(after)[:90]!r}"


def help_differences(after: Mapping[str, str]) -> Iterator[str]:
    """For each help text that is not the same, how many lines went and came, and the first of them."""
    for name, text in after.items():
        file = FOLDER / "help" / f"{name}.txt"
        old, new = (file.read_text(encoding="utf-8") if file.exists() else "").splitlines(), text.splitlines()
        gone, come = [line for line in old if line not in new], [line for line in new if line not in old]
        if old != new:
            first = (gone or come or ["the same lines in another order"])[0].strip()[:90]
            yield f"help/{name}: {len(gone)} lines gone, {len(come)} new; {first!r}"


def compare(parts: Sequence[str]) -> list[str]:
    """A line for each difference between what is on record and what the code gives now."""
    known, found = json.loads(GOLDEN.read_text(encoding="utf-8")), made(parts)
    lines = list(help_differences(found["help"])) if "help" in found else []
    for part in parts:
        if part != "help":
            lines += differences(known.get(part, "absent"), found[part], part)
    return lines


def write_names() -> None:
    """Names of all tests, without file and parameters, sorted, each once."""
    words = ("-m", "pytest", "--collect-only", "-q", "--rootdir", str(PROJECT), str(PROJECT / "tests"))
    nodes = [line.split("[")[0] for line in python(*words).splitlines() if "::" in line]
    names = sorted({node.split("::", 1)[1] for node in nodes})
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "test_names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")


def main() -> int:
    """Make, compare, or write the names of the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("make", "compare", "names"))
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    asked = parser.parse_args()
    if asked.task == "names":
        write_names()
        return 0
    if asked.task == "make":
        write(made(asked.only))
        return 0
    lines = compare(asked.only)
    print("\n".join(lines) or f"equal: {', '.join(asked.only)}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
