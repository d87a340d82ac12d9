"""Does the plan matter? The same drafter on the same data in other orders: held-out loss and τ at equal steps.

    python benchmarks/study.py --work runs/study                       # 5 plans x 2 window sizes x 5 seeds
    python benchmarks/study.py --work runs/study --seeds 3 --accumulate 1 --rate 0.02
    python benchmarks/study.py --work runs/study --quick               # 2 plans, 1 seed, some steps: does it work?

The data are the demo's chats, arranged as real sets are: kind and length go together (short prose; chats that ask for
three classes one after another, four to eight times as long). All plans have the same rows, epochs and number of
micro-batches an epoch, so the same number of steps and real tokens: each plan's token budget is searched for that. What
a plan costs beside that is its padding. Runs that are there already are read, not trained again.

Figures of a run: loss and τ of the training forward on all held-out rows (the target's own greedy answers), measured
`--every` steps; how much the loss jumps from step to step; real decoding of held-out prompts by kind, chain and tree.
Written: `study.json` and `study.png` in the work folder, and tables on standard output, mean ± the half width of a 95 %
confidence interval over seeds (Student's t).
"""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.checkpoint.run_directory import read_evaluations
from paceline.cli import main as paceline
from paceline.config import PlanConfig
from paceline.data.store import open_store
from paceline.observe.run_history import read_history
from paceline.plan.epoch import plan_epoch

ASSETS = Path(__file__).parents[1] / "src" / "paceline" / "assets" / "demo"
PLANS: dict[str, dict[str, str]] = {
    "sorted": {"strategy": "sorted", "schedule": "shuffled"},
    "shuffled": {"strategy": "shuffled", "schedule": "shuffled"},
    "six buckets": {"strategy": "bucketed", "schedule": "diverse"},
    "grid, shuffled": {"strategy": "grid", "schedule": "shuffled"},
    "grid, stratified": {"strategy": "grid", "schedule": "stratified"},
}
"""Name → strategy and schedule. Six buckets take another bucket than the last one each time."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "decay, token": {},
    "decay, anchor": {"weighting": "anchor"},
    "decay, sample": {"weighting": "sample"},
    "dpace, token": {"name": "dpace"},
}
BUDGET = 1024
"""Padded tokens of a micro-batch with the plan that others are made equal to."""
MAX_SAMPLES = 64
SHORT, CHATS_IN_ONE = 100, 3
"""Words of a short answer at most, and single chats that a long one joins."""


def arranged(source: Path, out: Path) -> None:
    """Writes the rows of a file of chats as short prose and long code, tagged so."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    single = [row for row in rows if len(row["messages"]) == 2]
    prose = [row for row in single if not {"class", "code"} & set(row["tags"])]
    prose = [row["messages"] for row in prose if len(row["messages"][1]["content"].split()) <= SHORT]
    code = [row["messages"] for row in single if "class" in row["tags"]]
    starts = range(0, len(code) - CHATS_IN_ONE + 1, CHATS_IN_ONE)
    joined = [[turn for chat in code[at : at + CHATS_IN_ONE] for turn in chat] for at in starts]
    # One of each in turn, as long as there are both: the first held-out rows are decoded.
    kinds = zip_longest(((chat, "prose") for chat in prose), ((chat, "code") for chat in joined))
    chats = [entry for pair in kinds for entry in pair if entry is not None]
    lines = [json.dumps({"messages": messages, "tags": [kind]}) + "\n" for messages, kind in chats]
    out.write_text("".join(lines), encoding="utf-8")


def settings(work: Path, run: dict[str, Any], budget: int, options: argparse.Namespace) -> dict[str, Any]:
    """Settings of one run, as in a file."""
    return {
        "run_dir": str(work / run["name"]),
        "seed": run["seed"],
        "target": {"path": str(ASSETS / "target"), "dtype": "float32", "num_taps": 4},
        "data": {
            "train": [str(work / "train.jsonl")],
            "heldout": [str(work / "heldout.jsonl")],
            "store": str(work / "store"),
        },
        "plan": {
            **PLANS[run["plan"]],
            "token_budget": budget,
            "width_multiple": 16,
            "max_samples": MAX_SAMPLES,
            "accumulate": run["accumulate"],
        },
        "drafter": {"num_layers": 2, "block_size": 8, "num_anchors": 32, "dtype": "float32"},
        "objective": OBJECTIVES[run["objective"]],
        "optimizer": {"name": "muon", "lr": run["rate"], "clip_norm": 5.0},
        "train": {"epochs": options.epochs, "max_steps": options.max_steps},
        "flow": {"mode": "inline", "threads": 1},
        "checkpoint": {"every_steps": 100_000},
        "evaluate": {
            "num_prompts": options.prompts,
            "max_new_tokens": 48,
            "dtype": "float32",
            "tree_budget": 64,
            "every_steps": options.every,
            "validation_samples": 256,
        },
        "observe": {"console": "quiet", "diagnose_every_steps": 0},
    }


def micro_batches(lengths: np.ndarray, plan: str, budget: int) -> int:
    """Micro-batches of an epoch with a plan and a token budget."""
    config = PlanConfig.model_validate(
        {**PLANS[plan], "token_budget": budget, "width_multiple": 16, "max_samples": MAX_SAMPLES}
    )
    return plan_epoch(lengths, None, config, num_anchors=32, block_size=8, seed=0, epoch=0).num_batches


def equal_budget(lengths: np.ndarray, plan: str, wanted: int) -> int:
    """The smallest token budget with which an epoch has at most so many micro-batches."""
    low, high = int(lengths.max()) + 16, 16 * BUDGET
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if micro_batches(lengths, plan, middle) <= wanted else (middle + 1, high)
    return low


def measured(folder: Path) -> dict[str, Any]:
    """Figures of a run that has ended."""
    history = read_history(folder)
    steps, losses = zip(*_series(folder, "validation/loss"), strict=True)
    taus = [value for _, value in _series(folder, "validation/tau")]
    trees = [1 + value for _, value in _series(folder, "validation/tree/streak_64")]
    loss = np.array(history.series("loss"))
    half = loss[len(loss) // 2 :]
    evaluation = read_evaluations(folder)[-1]
    return {
        "steps": list(steps),
        "validation_loss": list(losses),
        "validation_tau": taus,
        "validation_tree_tau": trees,
        "jump": float(np.abs(np.diff(half)).mean() / half.mean()),
        "padding_efficiency": float(np.nanmean(history.series("padding_efficiency"))),
        "decoded_tau": evaluation["tau_micro"],
        "decoded_tree_tau": evaluation["tree_tau"],
        "decoded_by_kind": {kind: evaluation["by_tag"][kind]["tau"] for kind in ("prose", "code")},
    }


def _series(folder: Path, name: str) -> list[tuple[int, float]]:
    """Step and value of every line that has a metric."""
    found = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        value = entry.get("values", {}).get(name)
        if value is not None:
            found.append((entry["step"], value))
    return found


STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % quantile of Student's t for so many values."""


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval; NaN of one value."""
    array = np.array(values, dtype=float)
    if len(array) < 2:
        return float(array.mean()), math.nan
    return float(array.mean()), float(STUDENT[len(array)] * array.std(ddof=1) / math.sqrt(len(array)))


def table(
    runs: Sequence[dict[str, Any]], group: Callable[[dict[str, Any]], tuple[str, ...]], heads: list[str]
) -> Table:
    """One row a group of runs that differ by their seed alone."""
    columns: dict[str, Callable[[dict[str, Any]], float]] = {
        "held-out loss": lambda run: run["validation_loss"][-1],
        "held-out τ": lambda run: run["validation_tau"][-1],
        "tree τ": lambda run: run["validation_tree_tau"][-1],
        "decoded τ": lambda run: run["decoded_tau"],
        "prose": lambda run: run["decoded_by_kind"]["prose"],
        "code": lambda run: run["decoded_by_kind"]["code"],
        "loss jumps": lambda run: run["jump"],
        "padding eff.": lambda run: run["padding_efficiency"],
    }
    shown = Table(*heads, "seeds", *columns, box=None)
    for key in dict.fromkeys(map(group, runs)):
        chosen = [run for run in runs if group(run) == key]
        cells = ["{:.3f} ± {:.3f}".format(*spread([of(run) for run in chosen])) for of in columns.values()]
        shown.add_row(*key, str(len(chosen)), *cells)
    return shown


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Held-out loss over steps, one panel a window size, mean and band over seeds."""
    from matplotlib.figure import Figure

    sizes = sorted({run["accumulate"] for run in runs})
    figure = Figure(figsize=(5.5 * len(sizes), 4), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        for plan in PLANS:
            chosen = [
                run
                for run in runs
                if (run["plan"], run["accumulate"], run["objective"]) == (plan, size, "decay, token")
            ]
            if not chosen:
                continue
            last = min(len(run["steps"]) for run in chosen)
            values = np.array([run["validation_loss"][:last] for run in chosen])
            middle, half = np.array([spread(column) for column in values.T]).T
            (line,) = axes.plot(chosen[0]["steps"][:last], middle, label=plan)
            axes.fill_between(
                chosen[0]["steps"][:last], middle - half, middle + half, alpha=0.2, color=line.get_color()
            )
        axes.set(title=f"{size} micro-batches a step", xlabel="step", ylabel="held-out loss")
        axes.legend()
    figure.savefig(path, dpi=150)


def wanted_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs of the study, seed by seed, so that an interrupted one holds whole rounds."""
    found = []
    for seed in range(options.seeds):
        for size in options.accumulate:
            for plan in options.plans:
                for objective in options.objectives:
                    name = f"{plan}-{size}-{objective}-{options.rate}-{seed}".replace(", ", "-").replace(" ", "-")
                    found.append(
                        {
                            "name": name,
                            "plan": plan,
                            "accumulate": size,
                            "objective": objective,
                            "rate": options.rate,
                            "seed": seed,
                        }
                    )
    return found


def done(folder: Path) -> bool:
    """Whether a run was trained to its end and decoded."""
    return (folder / "evaluation.json").is_file() and bool(read_evaluations(folder))


def main() -> None:
    """Train what is missing, then print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 11), metavar="1 to 10")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, help="end every run earlier")
    parser.add_argument("--every", type=int, default=15, help="steps between measurements on held-out rows")
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts that are decoded at the end")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 4], help="micro-batches of a step")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--objectives", nargs="+", default=["decay, token"], choices=list(OBJECTIVES))
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate of Muon")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.accumulate, options.max_steps, options.prompts = 1, [1], 4, 4
        options.every, options.plans = 2, ["six buckets", "grid, stratified"]
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    for name, file in (("chats", "train"), ("heldout", "heldout")):
        arranged(ASSETS / f"{name}.jsonl", work / f"{file}.jsonl")
    runs = wanted_runs(options)
    first = work / "prepare.yaml"
    first.write_text(yaml.safe_dump(settings(work, runs[0], BUDGET, options)), encoding="utf-8")
    if paceline(["prepare", str(first)]):
        raise SystemExit(1)
    lengths = open_store(work / "store").lengths
    base = micro_batches(lengths, "grid, stratified", BUDGET)
    budgets = {plan: equal_budget(lengths, plan, base) for plan in options.plans}
    console = Console(width=200)
    console.print({"micro-batches an epoch": base, "token budgets": budgets})
    for run in track(runs, "runs", console=Console(stderr=True)):
        folder = work / run["name"]
        if not done(folder):
            file = work / f"{run['name']}.yaml"
            file.write_text(yaml.safe_dump(settings(work, run, budgets[run["plan"]], options)), encoding="utf-8")
            with redirect_stdout(io.StringIO()):
                failed = paceline(["train", str(file)]) or paceline(["evaluate", str(folder), "--no-lossless"])
            if failed:
                raise SystemExit(1)
        run |= measured(folder)
        (work / "study.json").write_text(json.dumps([entry for entry in runs if "steps" in entry]), encoding="utf-8")
    console.print(
        table(
            runs,
            lambda run: (run["plan"], str(run["accumulate"]), run["objective"], str(run["rate"])),
            ["plan", "micro-batches a step", "objective", "rate"],
        )
    )
    draw(runs, work / "study.png")


if __name__ == "__main__":
    main()
