"""``paceline evaluate``: decode prompts speculatively and measure acceptance, several drafters side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.checkpoint.run_directory import (
    EVALUATION,
    add_evaluation,
    is_run_directory,
    read_run_facts,
    read_run_settings,
)
from paceline.cli import command
from paceline.cli.evaluate_server import ServerArguments, evaluate_server
from paceline.config import Settings, devices_of
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter
    from paceline.evaluate.report import EvaluationReport

DESCRIPTION = """Decode prompts speculatively with a drafter and measure acceptance.

τ is the mean number of tokens per target pass. The output is checked against the target's own greedy output token for
token, and against the drafts of the training forward. Several drafters are shown side by side. With a tree budget the
prompts are decoded with draft trees too, and both are shown.

Examples:
  paceline evaluate runs/first
  paceline evaluate runs/first --prompts chats.jsonl --evaluate.max-new-tokens 512
  paceline evaluate runs/first --prompts gsm8k:gsm8k/test.jsonl mt-bench:question.jsonl --evaluate.num-prompts 160
  paceline evaluate runs/first --evaluate.tree-budget 64
  paceline evaluate drafters/a drafters/b --target models/target --prompts chats.jsonl --plot tau.png --json

With --server a running vLLM or SGLang server answers the prompts instead, and nothing is loaded here: τ and acceptance
by slot from its counters, output tokens/s and time to first token with several numbers of requests at once, and with
--baseline the same of a server without the drafter, and whether the answers are equal.

  paceline evaluate runs/first --server http://localhost:8000 --baseline http://localhost:8001
"""


@dataclass
class Arguments(ServerArguments):
    """Which drafters, on which prompts."""

    drafters: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories (their newest checkpoint), or exported drafter folders."""
    prompts: list[str] | None = None
    """Files of chats, or of published sets: gsm8k:FILE, math-500:FILE, humaneval:FILE, mbpp:FILE, mt-bench:FILE.
    Unset: the held-out files of the run."""
    target: str | None = None
    """Folder or hub name of the target. Unset: the run's; needed for drafter folders."""
    step: int | None = None
    """Checkpoint of a run. Unset: the newest."""
    best: bool = False
    """The best checkpoint of each run by checkpoint.keep_best, or where that is unset by held-out τ."""
    device: str | None = None
    """Where both models run, for example cuda:0. Unset: where the run's first target ran, if this machine has that
    device, else cpu."""
    lossless: bool = True
    """Also decode plainly, and compare."""
    plot: Path | None = None
    """Also draw acceptance by slot, accepted lengths, τ by tag and by context length: a .png or .svg file."""


def run(argv: Sequence[str]) -> int:
    """Evaluate; exit code 1 when an answer differs from the target's own by more than rounding."""
    arguments, overrides = command.parse(
        Arguments, argv, prog="paceline evaluate", description=DESCRIPTION, settings=True
    )
    if not arguments.drafters:
        raise ConfigError("DRAFTERS: none given; name a run directory or a drafter folder")
    if arguments.plot is not None:
        from paceline.evaluate.plots import check_kind

        check_kind(arguments.plot)
    if arguments.server is not None:
        path = arguments.drafters[0]
        if len(arguments.drafters) > 1 or not is_run_directory(path):
            raise ConfigError("--server: give one run directory, whose prompts the server answers")
        if arguments.plot is not None:
            raise ConfigError("--plot: not with --server; `paceline report RUN` draws what servers did")
        return evaluate_server(path, *source_of(path, arguments, overrides), arguments)
    if given := [name for name in ("baseline", "model", "key_variable") if getattr(arguments, name) is not None]:
        raise ConfigError(f"--{given[0].replace('_', '-')}: belongs to --server; give the server's address too")
    if arguments.device is not None:
        check_device(arguments.device)
    sources = [source_of(path, arguments, overrides) for path in arguments.drafters]
    # All are read and checked before the first is decoded, which may take long.
    loaded = [load_network(path, step) for path, (_, step) in zip(arguments.drafters, sources, strict=True)]
    for path, (settings, _), (network, _) in zip(arguments.drafters, sources, loaded, strict=True):
        check_target_of(path, settings, network, other_target=arguments.other_target)
    reports: dict[str, EvaluationReport] = {}
    for path, (settings, _), (network, at) in zip(arguments.drafters, sources, loaded, strict=True):
        device = arguments.device or device_of(settings)
        report = evaluate_drafter(settings, network, title=str(path), device=device, check_lossless=arguments.lossless)
        reports[str(path)] = report
        for line in report.set_aside:
            command.stderr.print(escape(line), soft_wrap=True)
        if at is not None:
            own = _is_own(path, settings, arguments)
            add_evaluation(path, at, report.to_json(), "evaluations" if own else "others")
            kind = "" if own else " among the evaluations with other settings than the run's"
            command.stderr.print(f"written to {escape(str(path / EVALUATION))}{kind}")
    if arguments.json:
        command.write_json({name: report.to_json() for name, report in reports.items()})
    else:
        show(reports)
    if arguments.plot is not None:
        from paceline.evaluate.plots import draw_evaluations

        draw_evaluations(reports, arguments.plot)
        command.stderr.print(f"drawn: {escape(str(arguments.plot))}")
    return 1 if any(report.errors for report in reports.values()) else 0


def _is_own(path: Path, settings: Settings, arguments: Arguments) -> bool:
    """Whether a run is evaluated under its own settings: what card and report show first."""
    from paceline.evaluate.evaluator import conditions_of

    ours = read_run_settings(path)
    same = conditions_of(settings.target, settings.evaluate) == conditions_of(ours.target, ours.evaluate)
    return same and arguments.prompts is None and settings.target == ours.target


def check_device(name: str) -> None:
    """Refuse a device that this machine does not have."""
    from paceline.device import why_missing

    for device in devices_of(name):
        if reason := why_missing(device):
            raise ConfigError(f"--device {reason}")


def device_of(settings: Settings) -> str:
    """Where a run's first target ran; cpu where this machine does not have that, which is said."""
    from paceline.device import why_missing

    device = settings.flow.target_devices[0]
    reasons = [reason for name in devices_of(device) if (reason := why_missing(name))]
    if reasons:
        command.stderr.print(f"decoding on cpu in {settings.decode_dtype}: {escape(reasons[0])}", soft_wrap=True)
    return "cpu" if reasons else device


def source_of(path: Path, arguments: Arguments, overrides: Mapping[str, str]) -> tuple[Settings, int | None]:
    """Settings under which a drafter is evaluated, and its step."""
    from paceline.data.holdout import heldout_files

    settings, step = settings_of(path, arguments.step, arguments.target, overrides, best=arguments.best)
    if arguments.prompts is not None:
        settings = settings.model_copy(
            update={"data": settings.data.model_copy(update={"heldout": list(arguments.prompts)})}
        )
    elif is_run_directory(path):
        heldout = heldout_files(settings.data.heldout, settings.store_path)
        settings = settings.model_copy(update={"data": settings.data.model_copy(update={"heldout": heldout})})
    if not settings.data.heldout:
        raise ConfigError(
            f"{path}: no prompts; its settings name no data.heldout and no data.heldout_share, "
            "so give files with --prompts"
        )
    return settings, step


def settings_of(
    path: Path, step: int | None, target: str | None, overrides: Mapping[str, str], *, best: bool
) -> tuple[Settings, int | None]:
    """Settings of a run or of a drafter folder with a target, and the checkpoint that is asked for (None: the newest).

    Raises:
        ConfigError: it is neither, or flags that do not go with it.
    """
    at = None
    if is_run_directory(path):
        settings = read_run_settings(path, overrides)
        at = command.step_of_run(path, step, best=best)
    elif (path / "config.json").is_file():
        if target is None:
            raise ConfigError(f"{path}: is a drafter folder; name its target with --target")
        command.no_step_of_folder(path, step, best=best)
        settings = _bare_settings(target, overrides)
    else:
        raise ConfigError(f"{path}: neither a run directory nor a drafter folder; train or export first")
    if target is not None:
        settings = settings.model_copy(update={"target": settings.target.model_copy(update={"path": target})})
    return settings, at


def check_target_of(path: Path, settings: Settings, network: Drafter, *, other_target: bool) -> None:
    """Refuse a target other than the one that a run or an exported folder notes."""
    from paceline.export.compatibility import check_target
    from paceline.export.folder import read_note
    from paceline.target_model.facts import describe_target

    if is_run_directory(path):
        identity = read_run_facts(path).get("target")
    else:
        identity = read_note(path).get("target", {}).get("identity")
    facts = describe_target(settings.target)
    check_target(str(path), network.spec, facts, None if other_target else identity)


def _bare_settings(target: str, overrides: Mapping[str, str]) -> Settings:
    """Settings of a drafter that comes without a run: defaults, overridden by flags."""
    from paceline.config import load_settings

    return load_settings(None, {"run_dir": ".", "target.path": target, **overrides})


def load_network(path: Path, step: int | None = None) -> tuple[Drafter, int | None]:
    """The drafter of a run or of an exported folder; with its step where it is a run's."""
    from paceline.checkpoint.checkpoints import load_drafter
    from paceline.drafter.network import Drafter
    from paceline.drafter.spec import DrafterSpec
    from paceline.export.formats import read_drafter

    at = None
    if is_run_directory(path):
        values, state, at = load_drafter(path, step)
        spec = DrafterSpec.from_dict(values)
    else:
        spec, state = read_drafter(path)
    network = Drafter(spec)
    network.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return network, at


def evaluate_drafter(
    settings: Settings, network: Drafter, *, title: str, device: str = "cpu", check_lossless: bool = True
) -> EvaluationReport:
    """Decode the held-out prompts of some settings, with progress on standard error.

    Args:
        settings: target, held-out files and limits.
        network: the drafter.
        title: shown beside the progress.
        device: where both run.
        check_lossless: also decode plainly.

    Raises:
        PacelineError: one line for each error.
    """
    from paceline.evaluate.evaluator import Evaluator

    evaluator = Evaluator(settings.target, settings.data, settings.evaluate, network.spec.taps, device)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=command.stderr, transient=True) as bar:
        task = bar.add_task(f"decoding {escape(title)}", total=len(evaluator.prompts))
        return evaluator.measure(
            network,
            check_lossless=check_lossless,
            progress=lambda done, _: bar.update(task, completed=done),
        )


def show(reports: Mapping[str, EvaluationReport]) -> None:
    """Tables of the reports on standard output, one column a drafter."""
    from paceline.evaluate.report import table_rows

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in reports:
        table.add_column(escape(name), justify="right")
    columns = [dict(table_rows(report)) for report in reports.values()]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    command.stdout.print(table)
