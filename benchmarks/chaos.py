"""Kills a small real run again and again, goes on each time, and compares with a run that nobody touched.

    python benchmarks/chaos.py --kills 50

The run is a pipeline of several processes on the embedded target. Each kill is SIGKILL: to all of its processes at
once, to the parent alone, or to one worker; at a random moment of the start, between steps, or while a checkpoint is
being written or has just taken its name. The same command then goes on. At the end the final drafter, the optimizer's
state and the micro-batches of every step are compared with the undisturbed run's. Exit code 0: no difference.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from paceline.atomic_files import ASIDE
from paceline.checkpoint import checkpoints

ASSETS = Path(__file__).parent.parent / "src" / "paceline" / "assets" / "demo"
MOMENTS = ("start", "step", "step", "writing", "writing", "writing", "renamed")
VICTIMS = ("all", "all", "all", "parent", "worker")
LIMIT_S = 600.0
"""A start that shows nothing for this long is a hang, which is an error."""
GONE_S = 30.0
"""Processes that are left over after this long are orphans, which is an error."""


def settings_of(folder: Path, name: str, steps: int, arguments: argparse.Namespace) -> Path:
    """A settings file of a run whose steps are as cheap as they get."""
    lines = (ASSETS / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    chats = folder / "chats.jsonl"
    shortest = sorted(lines, key=len)[: arguments.chats]
    chats.write_text("\n".join(shortest) + "\n", encoding="utf-8")
    settings = {
        "run_dir": str(folder / name),
        "target": {"path": str(ASSETS / "target"), "dtype": "float32", "taps": [0]},
        "data": {"train": [str(chats)], "store": str(folder / "store"), "max_length": 256},
        "plan": {"token_budget": 512, "width_multiple": 32, "accumulate": 2, "max_samples": 2},
        "drafter": {"num_layers": 1, "block_size": 4, "num_anchors": 4, "dtype": "float32", "diagnose_every": 0},
        "optimizer": {"lr": 1e-3},
        "train": {"epochs": 100000, "max_steps": steps},
        "flow": {
            "mode": "pipeline",
            "delivery": arguments.delivery,
            "target_devices": ["cpu"] * arguments.targets,
            "drafter_devices": ["cpu"] * arguments.ranks,
        },
        "checkpoint": {"every_steps": arguments.every, "keep_last": 2},
        "observe": {"console": "quiet", "diagnose_every_steps": 0},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


@dataclass
class Start:
    """One start of the run, in a process group of its own."""

    settings: Path
    log: Path
    process: subprocess.Popen = field(init=False)
    family: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "paceline", "train", str(self.settings)]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def workers(self) -> list[int]:
        """Process ids of the stages: the children of the fork server, which is the parent's own child."""
        direct = children(self.process.pid)
        found = [pid for child in direct for pid in children(child)]
        self.family.update(direct, found)
        return found

    def strike(self, victim: str, chance: random.Random) -> str:
        """SIGKILL; says whom it hit."""
        workers = self.workers()
        if victim == "worker" and workers:
            self.kill(chance.choice(workers))
        elif victim == "parent":
            self.kill(self.process.pid)
        else:
            for pid in (self.process.pid, *workers, *self.family):
                self.kill(pid)
            victim = "all"
        return victim

    @staticmethod
    def kill(pid: int) -> None:
        """SIGKILL to a process, which may be gone."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def await_end(self) -> int:
        """Until the parent has ended; its exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            self.workers()
            if time.monotonic() > deadline:
                self.strike("all", random.Random(0))
                raise SystemExit(f"HANG: the run does not end; see {self.log}")
            time.sleep(0.02)
        return self.process.returncode

    def orphans(self) -> set[int]:
        """What is left of the family after a while."""
        deadline = time.monotonic() + GONE_S
        while left := {pid for pid in self.family if alive(pid)}:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.02)
        return set()


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be fetched does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """Processes that a process has started itself."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def await_moment(start: Start, moment: str, run_dir: Path, chance: random.Random) -> bool:
    """Wait for the moment; False where the run ended before it."""
    folder, metrics = run_dir / "checkpoints", run_dir / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT_S
    if moment == "start":
        until = time.monotonic() + chance.uniform(0.0, 8.0)
        reached = lambda: time.monotonic() >= until  # noqa: E731
    elif moment == "step":
        size, lines = (metrics.stat().st_size if metrics.exists() else 0), chance.randrange(1, 40)
        # A line is some 2 kB; the header of this start comes first.
        reached = lambda: metrics.exists() and metrics.stat().st_size > size + 1500 * lines  # noqa: E731
    else:
        before = set(names(folder))
        wanted = ASIDE if moment == "writing" else ""
        reached = lambda: any(name.endswith(wanted) for name in set(names(folder)) - before)  # noqa: E731
    while not reached():
        if start.process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            start.strike("all", chance)
            raise SystemExit(f"HANG: nothing happens while waiting for {moment}; see {start.log}")
        time.sleep(0.0005 if moment in ("writing", "renamed") else 0.005)
    if moment in ("writing", "renamed"):
        time.sleep(chance.choice((0.0, chance.uniform(0.0, 0.004), chance.uniform(0.0, 0.03))))
    return start.process.poll() is None


def names(folder: Path) -> list[str]:
    """What lies in a folder; nothing where it is not there."""
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


def trained(run_dir: Path) -> dict[int, list[int]]:
    """Step → micro-batches (epoch and index as one number) that the metrics say it trained."""
    found: dict[int, list[int]] = {}
    for text in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
        line = json.loads(text)
        if line["kind"] == "step":
            found.setdefault(line["step"], []).extend(line["epoch"] * 10**6 + index for index in line["batches"])
    return found


def losses(run_dir: Path) -> dict[int, float]:
    """Step → loss."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["values"]["loss"] for line in lines if line["kind"] == "step"}


def differing(ours: object, theirs: object, exact: bool) -> int:
    """Tensors and values that differ between two nested states."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)
        return int(not same)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return sum(differing(ours.get(key), theirs.get(key), exact) for key in {*ours, *theirs})
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)) and len(ours) == len(theirs):
        return sum(differing(a, b, exact) for a, b in zip(ours, theirs, strict=True))
    return int(ours != theirs)


def compare(whole: Path, killed: Path, steps: int, exact: bool) -> dict[str, int]:
    """What is not as in the undisturbed run."""
    ours, theirs = trained(killed), trained(whole)
    want = collections.Counter(key for keys in theirs.values() for key in keys)
    have = collections.Counter(key for keys in ours.values() for key in keys)
    mine, other = (checkpoints.checkpoint_path(run, steps) for run in (killed, whole))
    drafters = [load_file(path / checkpoints.WEIGHTS) for path in (mine, other)]
    states = [torch.load(path / checkpoints.STATE, weights_only=True) for path in (mine, other)]
    our_losses, their_losses = losses(killed), losses(whole)
    found = {
        "steps": steps,
        "micro-batches": want.total(),
        "lost": (want - have).total(),
        "repeated": (have - want).total(),
        "steps with other micro-batches": sum(sorted(ours.get(s, [])) != sorted(theirs.get(s, [])) for s in theirs),
        "tensors of the drafter": len(drafters[1]),
        "tensors of the drafter that differ": differing(*drafters, exact),
        "values of the optimizer's state that differ": differing(*states, exact),
    }
    if exact:
        found["losses that differ"] = sum(our_losses.get(s) != loss for s, loss in their_losses.items())
        found["steps in another order"] = sum(ours.get(s) != theirs[s] for s in theirs)
    return found


def main() -> int:
    """Kill, go on, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", type=int, default=2, help="target workers")
    parser.add_argument("--ranks", type=int, default=1, help="drafter ranks")
    parser.add_argument("--delivery", choices=["ordered", "ready"], default="ordered", help="ready: to tolerance")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--steps", type=int, default=None, help="of the run; unset: 25 for each kill, and 50")
    parser.add_argument("--minutes", type=float, default=1e9, help="after these no further kill")
    parser.add_argument("--chats", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=None, help="where the runs stay; unset: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        return chaos(arguments, arguments.folder or Path(temporary))


def chaos(arguments: argparse.Namespace, folder: Path) -> int:
    """The whole experiment in a folder; 0 where nothing differs."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(arguments.seed)
    steps = arguments.steps or 25 * arguments.kills + 50
    began = time.monotonic()
    whole = Start(settings_of(folder, "whole", steps, arguments), folder / "whole.log")
    if whole.await_end() != 0:
        print((folder / "whole.log").read_text())
        return 1
    print(f"undisturbed: {steps} steps in {time.monotonic() - began:.0f} s", flush=True)
    settings, run_dir = settings_of(folder, "killed", steps, arguments), folder / "killed"
    counts: collections.Counter[str] = collections.Counter()
    errors: list[str] = []
    kills = 0
    while kills < arguments.kills and time.monotonic() - began < 60 * arguments.minutes:
        moment, victim = chance.choice(MOMENTS), chance.choice(VICTIMS)
        start = Start(settings, folder / f"start-{kills:03d}.log")
        if not await_moment(start, moment, run_dir, chance):
            if start.await_end() == 0:
                print("the run is finished before the last kill; give more --steps")
                break
            errors.append(f"start {kills} ended by itself: {start.log.read_text().strip()}")
            break
        victim = start.strike(victim, chance)
        code = start.await_end()
        left = start.orphans()
        text = start.log.read_text()
        if left:
            errors.append(f"kill {kills} ({moment}, {victim}): orphans {sorted(left)}")
        if "Traceback" in text:
            errors.append(f"kill {kills} ({moment}, {victim}): a traceback, see {start.log}")
        if code == 0:
            print("the run is finished before the last kill; give more --steps")
            break
        if victim == "worker" and ("error: stage" not in text or code != 1):
            errors.append(f"kill {kills} ({moment}, {victim}): exit code {code}, and no line names the stage: {text}")
        unfinished = [name for name in names(run_dir / "checkpoints") if name.endswith((ASIDE, ".old"))]
        counts[f"{moment} × {victim}"] += 1
        counts["kills that left a half-written checkpoint"] += bool(unfinished)
        kills += 1
        at = checkpoints.newest_step(run_dir)
        if at and max(trained(run_dir), default=0) < at:
            errors.append(f"kill {kills} ({moment}, {victim}): the checkpoint of step {at} is ahead of the metrics")
        print(f"kill {kills:3d}: {moment:8s} {victim:7s} at checkpoint {at:5d} {' '.join(unfinished)}", flush=True)
    last = Start(settings, folder / "last.log")
    if last.await_end() != 0:
        print(last.log.read_text())
        return 1
    for name, count in sorted(counts.items()):
        print(f"{count:5d}  {name}")
    found = compare(folder / "whole", run_dir, steps, exact=arguments.delivery == "ordered")
    for name, value in found.items():
        print(f"{value:7d}  {name}")
    for error in errors:
        print(f"FAULT  {error}")
    bad = [name for name, value in found.items() if value and name not in ("steps", "micro-batches", TENSORS)]
    print(f"{kills} kills in {time.monotonic() - began:.0f} s: {'DIFFERENT' if bad or errors else 'no difference'}")
    return 1 if bad or errors else 0


TENSORS = "tensors of the drafter"

if __name__ == "__main__":
    sys.exit(main())
