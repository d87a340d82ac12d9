"""``paceline evaluate``: decode prompts speculatively and measure acceptance, several drafters side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from paceline.config import Settings
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
"""


@dataclass
class Arguments:
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
    device: str = "cpu"
    """Where both models run, for example cuda:0."""
    lossless: bool = True
    """Also decode plainly, and compare."""
    other_target: bool = False
    """Decode although the target is not the one that a drafter's folder names: fine-tuned since, or quantized."""
    plot: Path | None = None
    """Also draw acceptance by slot, accepted lengths, τ by tag and by context length: a .png or .svg file."""
    json: bool = False
    """Print the reports as JSON on standard output."""


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
    _check_device(arguments.device)
    sources = [_source(path, arguments, overrides) for path in arguments.drafters]
    # All are read and checked before the first is decoded, which may take long.
    loaded = [load_network(path, step) for path, (_, step) in zip(arguments.drafters, sources, strict=True)]
    for path, (settings, _), (network, _) in zip(arguments.drafters, sources, loaded, strict=True):
        _check_target(path, settings, network, other_target=arguments.other_target)
    reports: dict[str, EvaluationReport] = {}
    for path, (settings, _), (network, at) in zip(arguments.drafters, sources, loaded, strict=True):
        report = evaluate_drafter(
            settings, network, title=str(path), device=arguments.device, check_lossless=arguments.lossless
        )
        reports[str(path)] = report
        for line in report.set_aside:
            command.stderr.print(escape(line), soft_wrap=True)
        if at is not None and arguments.prompts is None:
            add_evaluation(path, at, report.to_json())
            command.stderr.print(f"noted in {escape(str(path / EVALUATION))}")
    if arguments.json:
        command.write_json({name: report.to_json() for name, report in reports.items()})
    else:
        show(reports)
    if arguments.plot is not None:
        from paceline.evaluate.plots import draw_evaluations

        draw_evaluations(reports, arguments.plot)
        command.stderr.print(f"drawn: {escape(str(arguments.plot))}")
    return 1 if any(report.errors for report in reports.values()) else 0


def _check_device(name: str) -> None:
    """Refuse a device that this machine does not have."""
    from paceline.device import why_missing

    if reason := why_missing(name):
        raise ConfigError(f"--device {reason}")


def _source(path: Path, arguments: Arguments, overrides: Mapping[str, str]) -> tuple[Settings, int | None]:
    """Settings under which a drafter is evaluated, and its step."""
    from paceline.data.holdout import heldout_files

    if is_run_directory(path):
        settings = read_run_settings(path, overrides)
    elif (path / "config.json").is_file():
        if arguments.target is None:
            raise ConfigError(f"{path}: is a drafter folder; name its target with --target")
        if arguments.step is not None:
            raise ConfigError(f"--step {arguments.step}: {path} is a drafter folder; only runs have steps")
        settings = _bare_settings(arguments.target, overrides)
    else:
        raise ConfigError(f"{path}: neither a run directory nor a drafter folder; train or export first")
    if arguments.target is not None:
        settings = settings.model_copy(update={"target": settings.target.model_copy(update={"path": arguments.target})})
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
    return settings, arguments.step


def _check_target(path: Path, settings: Settings, network: Drafter, *, other_target: bool) -> None:
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

    evaluator = Evaluator(settings, network.spec.taps, device)
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
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in reports:
        table.add_column(escape(name), justify="right")
    columns = [dict(_rows(report)) for report in reports.values()]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    command.stdout.print(table)


def _rows(report: EvaluationReport) -> list[tuple[str, str]]:
    """What a table says of one report: name and text."""
    from paceline.check.findings import size

    rows: list[tuple[str, Any]] = [
        ("τ, over target passes", f"{report.tau_micro:.3f}"),
        ("τ, over prompts", f"{report.tau_macro:.3f}"),
        ("prompts / target passes / tokens", f"{report.num_prompts} / {report.passes} / {report.new_tokens}"),
    ]
    rows += _tree_rows(report)
    if report.temperature:
        rows.append(("answers, compared with none", f"sampled at temperature {report.temperature:g}"))
    if report.lossless is not None:
        same = f"{report.lossless.equal} of {report.lossless.prompts}"
        rows.append((f"answers equal to the target's own ({report.dtype})", same))
    if report.tree is not None and report.tree.lossless is not None:
        same = f"{report.tree.lossless.equal} of {report.tree.lossless.prompts}"
        rows.append(("answers with trees equal to its own", same))
    if report.errors:
        rows.append(("[bold red]errors: differences beyond rounding[/]", str(report.errors)))
    if report.training_tau is not None:
        verdict = "" if report.training_agrees else " [bold red]differs by more than 2 %[/]"
        rows.append(("τ of the training forward on the same blocks", f"{report.training_tau:.3f}{verdict}"))
    if report.control_tau is not None:
        verdict = " [bold red]suspicious[/]" if report.control_suspicious else ""
        rows.append(("τ without features (control, near 1)", f"{report.control_tau:.3f}{verdict}"))
    if report.seconds_per_token is not None:
        rows.append(("time per token", _speed(report.seconds_per_token, report.plain_seconds_per_token)))
    if report.tree is not None and report.tree.seconds_per_token is not None:
        speed = _speed(report.tree.seconds_per_token, report.plain_seconds_per_token)
        rows.append(("time per token with trees", speed))
    memory = report.memory
    rows.append(("weights, target + drafter", f"{size(memory.target_weights)} + {size(memory.drafter_weights)}"))
    cached = f"{size(memory.target_cache_per_token)} + {size(memory.drafter_cache_per_token)}"
    rows.append(("cache of a token, target + drafter", cached))
    rows.append(("features of a token", size(memory.features_per_token)))
    if report.set_aside:
        rows.append(("prompts set aside, too long for the target", str(len(report.set_aside))))
    rows += [(f"draft {rate.slot} stands, given those before", _share(rate.conditional)) for rate in report.slots]
    rows += [(f"τ, tag {escape(tag)}", f"{entry.tau:.3f}") for tag, entry in report.by_tag.items()]
    rows += [(f"τ, context {name} tokens", f"{entry.tau:.3f}") for name, entry in report.by_context.items()]
    return rows


def _tree_rows(report: EvaluationReport) -> list[tuple[str, str]]:
    """τ with draft trees, with a mark where they do worse than the chain."""
    tree = report.tree
    if tree is None:
        return []
    verdict = " [bold red]below the chain[/]" if tree.below_chain else ""
    kind = ["chain first"] * tree.chain_seed + [f"temperature {tree.temperature:g}"] * (tree.temperature != 1)
    rows = [
        (f"τ with trees of {tree.budget} nodes", f"{tree.tau_micro:.3f}{verdict}"),
        ("τ with trees, over prompts", f"{tree.tau_macro:.3f}"),
        ("target passes / tokens with trees", f"{tree.passes} / {tree.new_tokens}"),
    ]
    return rows + ([("trees", ", ".join(kind))] if kind else [])


def _speed(seconds: float, plain: float | None) -> str:
    return f"{1e3 * seconds:.1f} ms" + (f" ({plain / seconds:.2f}x as fast as plain)" if plain else "")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
