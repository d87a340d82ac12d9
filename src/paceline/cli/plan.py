"""``paceline plan``: what an epoch will look like, from lengths alone: buckets, padding, windows, steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import tyro
from rich.markup import escape
from rich.text import Text

from paceline.checkpoint.run_directory import is_run_directory, read_run_facts
from paceline.cli import command
from paceline.cli.plan_view import histogram, render, render_comparison, render_edges
from paceline.config import Settings, load_settings
from paceline.config.schema import PlanConfig, Schedule, Strategy
from paceline.errors import ConfigError, PlanError

if TYPE_CHECKING:
    import numpy as np

    from paceline.plan.edges import Edges
    from paceline.plan.entries import Groups
    from paceline.plan.epoch import EpochPlan
    from paceline.plan.forecast import Forecast

DESCRIPTION = """Dry run of an epoch: length histogram, buckets, padding, windows, steps. Needs nothing but lengths.

SOURCE is a run's YAML or folder, a prepared store, or a file of lengths: .npy, .npz, .jsonl, .parquet, or text with one
length a line.

Examples: paceline plan run.yaml
          paceline plan lengths.npy --compare
          paceline plan lengths.npy --plan.token_budget 16384 --plan.strategy bucketed --plot plan.png"""


@dataclass
class Arguments:
    """Whose epoch, and how it is shown."""

    source: Annotated[str, tyro.conf.Positional]
    """Run's YAML or folder, prepared store, or file of lengths."""
    compare: bool = False
    """All strategies and schedules side by side."""
    plot: str | None = None
    """Draw it: a .png or .svg file."""
    edges: bool = False
    """Also the best edges for 1 to plan.num_buckets buckets, and how many let every window hold different ones only."""
    json: bool = False
    """Print JSON."""
    epochs: int | None = None
    """Epochs of the run. Unset: those of the YAML, else 1."""
    replicas: int | None = None
    """Drafter replicas that share every window. Unset: those that the run was started with, those of the YAML, or 1."""
    tokens_per_s: float | None = None
    """Padded tokens a second that the pipeline manages, for an estimate of the time."""
    column: str | None = None
    """Column or array with the lengths, where a file has several."""
    group: str | None = None
    """Column with the tag or source of a sample, for plan.weights."""


@dataclass(frozen=True, slots=True)
class Source:
    """Lengths and what belongs to them."""

    name: str
    settings: Settings
    lengths: np.ndarray
    eligible: np.ndarray | None
    groups: Groups | None
    epochs: int
    replicas: int


def run(argv: Sequence[str]) -> int:
    """Plan and print."""
    arguments, overrides = command.parse(Arguments, argv, prog="paceline plan", description=DESCRIPTION, settings=True)
    _check(arguments)
    source = read_source(arguments, overrides)
    if arguments.compare:
        return _run_compare(arguments, source)
    from paceline.plan.epoch import plan_epoch
    from paceline.plan.forecast import describe

    plans: list[EpochPlan] = []
    with command.stderr.status("planning"):
        windows = []
        for epoch in range(max(source.epochs, 2)):
            plan = plan_epoch(source.lengths, source.eligible, source.settings.plan, epoch=epoch, **_shape(source))
            plans += [plan] if epoch < 2 else []
            windows.append(plan.num_windows)
        weighting = source.settings.objective.weighting
        forecast = describe(plans[0], plans[1], windows[2:], source.epochs, arguments.tokens_per_s, weighting=weighting)
    if arguments.plot is not None:
        from paceline.plan.plots import draw_plan

        draw_plan(plans[0], forecast, Path(arguments.plot))
    ladder, distinct = _ladder(plans[0]) if arguments.edges else ([], None)
    if arguments.json:
        command.write_json(forecast.to_dict() | ({"best_edges": _edges_json(ladder, distinct)} if ladder else {}))
        return 0
    command.stdout.print(render(forecast, histogram=histogram(plans[0])))
    if ladder:
        command.stdout.print(render_edges(ladder, distinct, plans[0].window_size))
    if arguments.plot is not None:
        command.stdout.print(f"drawn: {escape(arguments.plot)}")
    return 0


def _check(arguments: Arguments) -> None:
    errors = [
        f"--{name.replace('_', '-')} {value}: must be more than 0"
        for name, value in (
            ("epochs", arguments.epochs),
            ("replicas", arguments.replicas),
            ("tokens_per_s", arguments.tokens_per_s),
        )
        if value is not None and not value > 0
    ]
    if arguments.plot is not None and Path(arguments.plot).suffix.lower() not in (".png", ".svg"):
        errors.append(f"--plot {arguments.plot}: a picture is written as .png or .svg; name the file so")
    if arguments.compare:
        for name, given in (("edges", arguments.edges), ("epochs", arguments.epochs is not None)):
            if given:
                errors.append(f"--{name} has no part in --compare, which looks at one epoch; leave one of the two out")
    if errors:
        raise ConfigError(*errors)


def _shape(source: Source) -> dict[str, Any]:
    drafter = source.settings.drafter
    return {
        "num_anchors": drafter.num_anchors,
        "block_size": drafter.block_size,
        "replicas": source.replicas,
        "seed": source.settings.seed,
        "groups": source.groups,
    }


def read_source(arguments: Arguments, overrides: Mapping[str, str]) -> Source:
    """Lengths and settings of a run's YAML or folder, a store, or a file of lengths.

    Raises:
        ConfigError, DataError, PlanError: what cannot be read; one line each.
    """
    path = Path(arguments.source)
    started = path if (path / "settings.yaml").is_file() else None
    is_run = path.suffix.lower() in (".yaml", ".yml") or started is not None
    if is_run:
        settings = load_settings(path if started is None else started / "settings.yaml", overrides)
    else:
        settings = load_settings(None, {"run_dir": "unused", "target.path": "unused", **overrides})
    planned_for = len(settings.flow.drafter_devices) if is_run else 1
    if started is not None and is_run_directory(started):
        planned_for = read_run_facts(started).get("replicas", planned_for)
    replicas = arguments.replicas or planned_for
    epochs = arguments.epochs or (settings.train.epochs if is_run else 1)
    if is_run or path.is_dir():
        if arguments.column is not None or arguments.group is not None:
            raise PlanError("--column and --group belong to a file of lengths; a store has its own columns")
        from paceline.data.store import open_store
        from paceline.plan.entries import groups_of_tags

        folder = Path(settings.store_path) if is_run else path
        if path.is_dir() and (path / "store").is_dir():
            folder = path / "store"
        store = open_store(folder)
        weights = settings.plan.weights
        groups = groups_of_tags(store.names(), weights) if weights else None
        return Source(str(path), settings, store.lengths, store.eligible, groups, epochs, replicas)
    from paceline.plan.lengths_file import read_lengths

    file = read_lengths(path, arguments.column, arguments.group)
    return Source(str(path), settings, file.lengths, file.eligible, file.groups, epochs, replicas)


def _ladder(plan: EpochPlan) -> tuple[list[Edges], Edges | None]:
    """The best edges for every number of buckets up to the settings', and the fewest for all-distinct windows."""
    from paceline.plan.budget import BatchBudget
    from paceline.plan.edges import edge_ladder, smallest_distinct

    lengths, limits = plan.lengths[plan.composition.order], BatchBudget.of(plan.settings)
    most = min(plan.settings.num_buckets, len({limits.width(int(length)) for length in set(lengths.tolist())}))
    return edge_ladder(lengths, limits, most), smallest_distinct(lengths, limits, plan.window_size)


def _edges_json(ladder: Sequence[Edges], distinct: Edges | None) -> dict[str, Any]:
    rows = [
        {"edges": made.edges.tolist(), "efficiency": made.efficiency, "largest_share": made.largest_share}
        for made in ladder
    ]
    return {"by_buckets": rows, "smallest_all_distinct": None if distinct is None else len(distinct.edges)}


def _run_compare(arguments: Arguments, source: Source) -> int:
    from paceline.plan.forecast import describe
    from paceline.plan.metrics import repairing

    rows: dict[str, list[Forecast]] = {}
    times: dict[str, float] = {}
    refused: dict[str, str] = {}
    schedules = get_args(Schedule)
    weighting = source.settings.objective.weighting
    with command.stderr.status("planning") as status:
        for strategy in get_args(Strategy):
            status.update(f"planning {strategy}")
            settings = source.settings.plan.model_copy(update={"strategy": strategy})
            try:
                plans, following, seconds = _timed_plans(source, settings, schedules)
            except PlanError as error:
                refused[strategy] = str(error)
                continue
            again = repairing(plans[0], following)
            rows[strategy] = [
                describe(plan, following, (), 1, arguments.tokens_per_s, repaired=again, weighting=weighting)
                for plan in plans
            ]
            times[strategy] = seconds
    if not rows:
        raise PlanError(*dict.fromkeys(refused.values()))
    forecasts = [made for group in rows.values() for made in group]
    if arguments.plot is not None:
        from paceline.plan.plots import draw_comparison

        draw_comparison(forecasts, Path(arguments.plot))
    if arguments.json:
        command.write_json({"plans": [made.to_dict() for made in forecasts], "plan_s": times, "refused": refused})
        return 0
    command.stdout.print(render_comparison(rows, times))
    for strategy, why in refused.items():
        command.stdout.print(Text.assemble((f"{strategy} left out: ", "bold yellow"), why))
    if arguments.plot is not None:
        command.stdout.print(f"drawn: {escape(arguments.plot)}")
    return 0


def _timed_plans(
    source: Source, settings: PlanConfig, schedules: Sequence[Schedule]
) -> tuple[list[EpochPlan], EpochPlan, float]:
    """The first epoch in every schedule, the second in the settings' own, and the seconds that this last plan took."""
    from paceline.plan.epoch import plan_epoch, plan_schedules

    shape = _shape(source)
    plans = plan_schedules(source.lengths, source.eligible, settings, schedules, epoch=0, **shape)
    started = time.perf_counter()
    following = plan_epoch(source.lengths, source.eligible, settings, epoch=1, **shape)
    return plans, following, time.perf_counter() - started
