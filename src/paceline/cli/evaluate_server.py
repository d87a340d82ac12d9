"""``paceline evaluate --server``: a running server measured with the prompts of a run."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.checkpoint.run_directory import EVALUATION, add_evaluation, read_run_facts
from paceline.cli import command
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.config import Settings
    from paceline.evaluate.prompts import Prompt
    from paceline.evaluate.server import ServerReport
    from paceline.evaluate.server_client import MeasuredServer, ServedModel


@dataclass(kw_only=True)
class ServerArguments:
    """Which server, and what is common with decoding here."""

    server: str | None = None
    """Address of a running server of the run's target and drafter, for example http://localhost:8000."""
    baseline: str | None = None
    """Address of a running server of the same target without a drafter."""
    model: str | None = None
    """Name of the model at both servers. Unset: the only one that each names."""
    key_variable: str | None = None
    """Environment variable that holds the servers' key."""
    other_target: bool = False
    """Decode although the target is not the one that a drafter's folder names: fine-tuned since, or quantized. With
    --server: although the server's model has another name."""
    json: bool = False
    """Print the reports as JSON on standard output."""


def evaluate_server(path: Path, settings: Settings, step: int | None, arguments: ServerArguments) -> int:
    """Measure, show, and write into the run's evaluation.json.

    Args:
        path, settings: of the run, with its held-out files named.
        step: of the drafter at the server; None is that of the run's newest export.
        arguments: with a server.

    Raises:
        PacelineError: one line for each error.
    """
    from paceline.evaluate.server import check_counters
    from paceline.evaluate.server_client import MeasuredServer

    key = _key(arguments.key_variable)
    assert arguments.server is not None
    server = MeasuredServer(arguments.server, key)
    baseline = MeasuredServer(arguments.baseline, key) if arguments.baseline is not None else None
    try:
        model = _checked_model(server, settings, arguments)
        engine = check_counters(server, drafts=True)
        other = None
        if baseline is not None:
            other = baseline, _checked_model(baseline, settings, arguments)
            check_counters(baseline, drafts=False)
        command.stderr.print(f"{escape(server.url)}: {engine} with {escape(model.name)}")
        report = _measured(path, settings, server, model, other)
    finally:
        server.close()
        if baseline is not None:
            baseline.close()
    for note in report.notes:
        command.notice(note)
    add_evaluation(path, _exported_step(path) if step is None else step, report.to_json(), "servers")
    command.stderr.print(f"written to {escape(str(path / EVALUATION))} among the servers")
    if arguments.json:
        command.write_json(report.to_json())
    else:
        _show(report)
    return 0


def _key(variable: str | None) -> str | None:
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"--key-variable {variable}: no such environment variable is set")
    return os.environ[variable] if variable is not None else None


def _checked_model(server: MeasuredServer, settings: Settings, arguments: ServerArguments) -> ServedModel:
    """The model that is asked for, which has a name of the target."""
    from paceline.evaluate.server import check_model
    from paceline.export.engines import ServedTarget

    model = server.model(arguments.model)
    if not arguments.other_target:
        check_model(server, model, [settings.target.path, ServedTarget.of(settings.target).name])
    return model


def _exported_step(run_dir: Path) -> int:
    """Step of the run's newest exported folder, which servers are started with; without one, of its checkpoint."""
    from paceline.checkpoint.checkpoints import newest_step
    from paceline.export.folder import newest_export, read_note

    folder = newest_export(run_dir)
    return newest_step(run_dir) if folder is None else read_note(folder)["step"]


def _measured(
    run_dir: Path,
    settings: Settings,
    server: MeasuredServer,
    model: ServedModel,
    baseline: tuple[MeasuredServer, ServedModel] | None,
) -> ServerReport:
    """Render the prompts and measure, with progress on standard error."""
    from paceline.drafter.spec import DrafterSpec
    from paceline.evaluate.evaluator import conditions_of_prompts
    from paceline.evaluate.server import fitting_prompts, measure_server, num_requests

    limits = settings.evaluate
    prompts = _prompts(settings, server, model)
    kept, notes = fitting_prompts(prompts, model, limits.max_new_tokens)
    spec = DrafterSpec.from_dict(read_run_facts(run_dir)["drafter"])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=command.stderr, transient=True) as bar:
        total = num_requests(len(kept), limits) * (1 if baseline is None else 2)
        task = bar.add_task("answers", total=total)
        report = measure_server(
            server,
            model,
            kept,
            limits,
            baseline=baseline,
            num_drafts=spec.num_drafts,
            progress=lambda: bar.advance(task),
        )
    kept_settings = {"num_prompts", "max_new_tokens", "temperature", "seed", "concurrency"}
    conditions = {
        **limits.model_dump(mode="json", include=kept_settings),
        **conditions_of_prompts(kept, settings.data),
        "engine": report.engine,
        "num_drafts": report.num_drafts,
        "baseline": baseline is not None,
    }
    return dataclasses.replace(report, notes=[*notes, *report.notes], conditions=conditions)


def _prompts(settings: Settings, server: MeasuredServer, model: ServedModel) -> list[Prompt]:
    """The held-out prompts as the target's template writes them; later turns follow the server's own answers."""
    from paceline.evaluate.prompts import PromptRenderer, render_prompts, with_later_turns

    target, data, limits = settings.target, settings.data, settings.evaluate
    renderer = PromptRenderer(target.path, data.thinking, data.template_switches, target.trust_remote_code)

    def answer(ids: list[int]) -> str | None:
        if model.max_length is not None and len(ids) + limits.max_new_tokens > model.max_length:
            return None
        return server.answer(model.name, ids, limits.max_new_tokens).text

    return with_later_turns(
        render_prompts(data.heldout, renderer, limits.num_prompts), renderer, answer, limits.num_prompts
    )


def _show(report: ServerReport) -> None:
    from paceline.evaluate.server import speed_rows, table_rows

    facts = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, text in table_rows(report):
        facts.add_row(name, escape(text))
    command.stdout.print(facts)
    command.stdout.print()
    head, rows = speed_rows(report)
    speeds = Table(box=None, padding=(0, 2, 0, 0))
    for name in head:
        speeds.add_column(name, justify="right")
    for row in rows:
        speeds.add_row(*row)
    command.stdout.print(speeds)
