"""`paceline demo`: the whole path on an embedded small target."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from paceline.checkpoint.run_lock import hold_run
from paceline.cli import command
from paceline.config import Settings, load_settings
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.run.run import Run

DESCRIPTION = """The whole path on an embedded small target and its own chats, on the CPU in a few minutes:
prepare, plan, train through the process pipeline, evaluate, export, report.

A demo that was interrupted resumes from its newest checkpoint.

Example: paceline demo --run-dir runs/demo --seed 1
"""


@dataclass
class Arguments:
    """Where the demo's run goes."""

    run_dir: Path = Path("runs/demo")
    """Directory of the run."""
    seed: int = 0
    """Key of all randomness."""


def run(argv: Sequence[str]) -> int:
    """Walk the whole path; exit code 1 when an answer differs from the target's own."""
    arguments, overrides = command.parse(Arguments, argv, prog="paceline demo", description=DESCRIPTION, settings=True)
    settings = demo_settings(arguments, overrides)
    with hold_run(Path(settings.run_dir)):
        return _walk(settings)


def _walk(settings: Settings) -> int:
    _headline(1, "prepare", "chats → tokens and loss masks")
    from paceline.cli.train import ready_store, show_run
    from paceline.run.build import build_run, resolve_models
    from paceline.run.support import check_support
    from paceline.train import train

    check_support(settings)
    models = resolve_models(settings)
    ready_store(settings, models.facts)

    _headline(2, "plan", "an epoch before it is run")
    run = build_run(settings, models)
    _show_forecast(run)

    _headline(3, "train", "a target process and a drafter process, joined by the buffer pool")
    _evaluate_once(run.run_dir, settings, step=0, title="before training")
    show_run(run)
    outcome = train(run, notice=command.notice, console=command.stderr)
    if outcome.stopped:
        command.stderr.print(
            f"stopped at step {outcome.step}; resume with: paceline demo --run-dir {escape(settings.run_dir)}"
        )
        return 0

    _headline(4, "evaluate", "held-out prompts, decoded speculatively and checked against the target's own answers")
    _evaluate_once(run.run_dir, settings, step=outcome.step, title="after training")

    _headline(5, "export", "a drafter folder, read back and compared")
    from paceline.cli.export import export_run

    folder = export_run(run.run_dir)

    _headline(6, "report", "one HTML file")
    from paceline.report.report import write_report

    report = write_report(run.run_dir)
    _summary(run.run_dir, folder, report)
    return 0


def demo_settings(arguments: Arguments, overrides: dict[str, str]) -> Settings:
    """The shipped settings with the paths of the installed package."""
    assets = Path(str(importlib.resources.files("paceline"))) / "assets" / "demo"
    return load_settings(
        assets / "demo.yaml",
        {
            "run_dir": str(arguments.run_dir),
            "seed": str(arguments.seed),
            "target.path": str(assets / "target"),
            "data.train": f"[{assets / 'chats.jsonl'}]",
            "data.heldout": f"[{assets / 'heldout.jsonl'}]",
            **overrides,
        },
    )


def _headline(number: int, name: str, text: str) -> None:
    command.stderr.print(f"\n[bold]{number} {name}[/]  {escape(text)}")


def _show_forecast(run: Run) -> None:
    from paceline.plan.forecast import forecast
    from paceline.plan.views import render

    made = forecast(run.plan.whole_epoch, run.settings.train.epochs)
    command.stderr.print(render(made, run.source.lengths))


def _evaluate_once(run_dir: Path, settings: Settings, *, step: int, title: str) -> None:
    """Decode the held-out prompts with the drafter of a step (0: as it starts), unless that is on record.

    Raises:
        PacelineError: a trained drafter's answer differs from the target's own.
    """
    from paceline.checkpoint import checkpoints, run_directory
    from paceline.cli.evaluate import evaluate_drafter
    from paceline.drafter.network import Drafter
    from paceline.drafter.spec import DrafterSpec

    if step in {entry["step"] for entry in run_directory.read_evaluations(run_dir)}:
        return
    spec = DrafterSpec.from_dict(run_directory.read_run_facts(run_dir)["drafter"])
    network = Drafter(spec, seed=settings.seed)
    if step:
        network.load_state_dict(checkpoints.load_drafter(run_dir, step)[1])
    report = evaluate_drafter(settings, network, title=title, check_lossless=step > 0)
    run_directory.add_evaluation(run_dir, step, report.to_json())
    lossless = report.lossless
    if lossless is not None and lossless.equal != lossless.prompts:
        raise PacelineError(
            f"{run_dir}: decoding {title}: an answer differs from the target's own; see evaluation.json"
        )


def _summary(run_dir: Path, folder: Path, report: Path) -> None:
    from paceline.checkpoint.run_directory import read_evaluations
    from paceline.observe.run_history import read_history

    history, (before, *_, after) = read_history(run_dir), read_evaluations(run_dir)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    lossless = after["lossless"]
    rows: list[tuple[str, Any]] = [
        ("acceptance length τ", f"{before['tau_micro']:.2f} before, {after['tau_micro']:.2f} after training"),
        (
            "held-out answers",
            f"{lossless['equal']} of {lossless['prompts']} equal to the target's own, token for token",
        ),
        ("real tokens/s", f"{history.pooled('real_tokens_per_s'):,.0f}"),
        ("draft positions/s", f"{history.pooled('draft_positions_per_s'):,.0f}"),
        ("padding efficiency", f"{history.pooled('padding_efficiency'):.1%}"),
        ("run", run_dir),
        ("drafter", folder),
        ("report", report),
    ]
    for name, value in rows:
        table.add_row(name, escape(str(value)))
    command.stdout.print()
    command.stdout.print(table)
    command.stdout.print(
        "\nThe same with your own model (settings: examples/ or `paceline train --help`):\n"
        "  paceline regenerate prompts.jsonl --target MODEL --local --out chats.jsonl\n"
        "  paceline train run.yaml\n"
        "  paceline export RUN",
        markup=False,
    )
