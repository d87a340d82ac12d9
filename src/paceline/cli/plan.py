"""``paceline plan``: what an epoch will look like, from lengths alone: buckets, padding, windows, steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.markup import escape

from paceline.checkpoint.run_directory import is_run_directory, read_run_facts
from paceline.cli import command
from paceline.config import PlanConfig, Settings, load_settings
from paceline.errors import ConfigError, PlanError

if TYPE_CHECKING:
    import numpy as np

    from paceline.plan.entries import Groups
    from paceline.plan.epoch import EpochPlan

DESCRIPTION = """Dry run of an epoch: length histogram, buckets, padding, windows, steps. Needs nothing but lengths.

SOURCE is a run's YAML or folder, a prepared store, or lengths: .npy, .npz, .jsonl, .parquet, .arrow, a folder that
`datasets` saved, or text with one length a line.

Examples:
  paceline plan run.yaml
  paceline plan lengths.npy --compare
  paceline plan lengths.npy --plan.token_budget 16384 --plan.strategy bucketed --plot plan.png
"""

MOST_LADDER = 64
"""Numbers of buckets that --edges looks at."""


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
    """Real tokens a second of the pipeline, for an estimate of the time. Unset: what the run has measured, if any."""
    column: str | None = None
    """Column or array with the lengths, where a file has several."""
    group: str | None = None
    """Column with the tag or source of a sample, for plan.weights."""


@dataclass(frozen=True, slots=True)
class Source:
    """Lengths and what belongs to them."""

    settings: Settings
    lengths: np.ndarray
    eligible: np.ndarray | None
    groups: Groups | None
    epochs: int
    replicas: int
    supervised: np.ndarray | None = None
    real_tokens_per_s: float | None = None
    lines: Sequence[str] = ()
    """What a store's report says of lengths."""

    def plan(self, settings: PlanConfig, epoch: int) -> EpochPlan:
        """The plan of an epoch with some planning settings."""
        from paceline.plan.epoch import plan_epoch

        drafter = self.settings.drafter
        return plan_epoch(
            self.lengths,
            self.eligible,
            settings,
            num_anchors=drafter.num_anchors,
            block_size=drafter.block_size,
            replicas=self.replicas,
            seed=self.settings.seed,
            epoch=epoch,
            groups=self.groups,
        )


def run(argv: Sequence[str]) -> int:
    """Plan and print."""
    arguments, overrides = command.parse(Arguments, argv, prog="paceline plan", description=DESCRIPTION, settings=True)
    _check(arguments)
    source = read_source(arguments, overrides)
    with command.stderr.status("planning"):
        values, shown = (_comparison if arguments.compare else _forecast)(arguments, source)
    if arguments.json:
        command.write_json(values)
        return 0
    for part in (*shown, *source.lines):
        command.stdout.print(part)
    if arguments.plot is not None:
        command.stdout.print(f"drawn: {escape(arguments.plot)}")
    return 0


def _forecast(arguments: Arguments, source: Source) -> tuple[dict[str, Any], list[Any]]:
    """One plan as plain values, and as it is shown."""
    from paceline.plan.budget import BatchBudget
    from paceline.plan.edges import all_distinct, edge_ladder
    from paceline.plan.entries import width_histogram
    from paceline.plan.forecast import forecast
    from paceline.plan.metrics import kept_by_length
    from paceline.plan.plots import draw_plan
    from paceline.plan.views import render, render_edges, render_kept

    config = source.settings.plan
    first = source.plan(config, 0)
    made = forecast(
        lambda epoch: source.plan(config, epoch),
        source.epochs,
        weighting=source.settings.objective.weighting,
        real_tokens_per_s=arguments.tokens_per_s or source.real_tokens_per_s,
    )
    kept = kept_by_length(source.lengths, source.lengths if source.supervised is None else source.supervised)
    values = {**made.to_dict(), "kept_by_max_length": [asdict(row) for row in kept]}
    shown: list[Any] = [render(made, source.lengths)]
    if source.supervised is None:  # a store's own report says it of supervised tokens, of dropped rows too
        shown.append(render_kept(kept))
    if arguments.edges:
        lengths = source.lengths[first.batches.order]
        ladder = edge_ladder(width_histogram(lengths, config.width_multiple), BatchBudget.of(config), MOST_LADDER)
        rungs, distinct = ladder[: config.num_buckets], all_distinct(ladder, first.window_size)
        values["best_edges"] = {
            "by_buckets": [
                {
                    "edges": rung.edges.tolist(),
                    "efficiency": made.real_tokens / rung.padded_tokens,
                    "largest_share": rung.largest_share,
                }
                for rung in rungs
            ],
            "smallest_all_distinct": None if distinct is None else len(distinct.edges),
        }
        shown.append(render_edges(ladder, made.real_tokens, config.num_buckets, first.window_size))
    if arguments.plot is not None:
        draw_plan(first, made, Path(arguments.plot))
    return values, shown


def _comparison(arguments: Arguments, source: Source) -> tuple[dict[str, Any], list[Any]]:
    """All strategies and schedules as plain values, and as they are shown."""
    from paceline.plan.comparison import compare, render_comparison
    from paceline.plan.plots import draw_comparison

    found = compare(source.plan, source.settings.plan, source.settings.objective.weighting)
    if arguments.plot is not None:
        draw_comparison(found.all, Path(arguments.plot))
    plans = [made.to_dict() for made in found.all]
    return {"plans": plans, "plan_s": found.seconds, "refused": found.refused}, [render_comparison(found)]


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
                errors.append(f"--{name} does not go with --compare, which looks at one epoch; leave one of them out")
    if errors:
        raise ConfigError(*errors)


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
    saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))  # by `datasets`
    if is_run or (path.is_dir() and not saved):
        if arguments.column is not None or arguments.group is not None:
            raise PlanError("--column and --group belong to a file of lengths; a store has its own columns")
        from paceline.data.coverage import cap_lines
        from paceline.data.store import open_store
        from paceline.plan.entries import groups_of_tags

        folder = Path(settings.store_path) if is_run else path
        if path.is_dir() and (path / "store").is_dir():
            folder = path / "store"
        store = open_store(folder)
        weights = settings.plan.weights
        groups = groups_of_tags(store.names(), weights) if weights else None
        return Source(
            settings,
            store.lengths,
            store.eligible,
            groups,
            epochs,
            replicas,
            supervised=store.supervised,
            real_tokens_per_s=None if started is None else _speed(started),
            lines=cap_lines(store.manifest.report),
        )
    from paceline.plan.lengths_file import read_lengths

    file = read_lengths(path, arguments.column, arguments.group)
    return Source(settings, file.lengths, file.eligible, file.groups, epochs, replicas)


def _speed(run_dir: Path) -> float | None:
    """Real tokens a second that a run has measured; None before its first step."""
    from paceline.observe.metrics_file import METRICS_FILE
    from paceline.observe.run_history import read_history

    if not (run_dir / METRICS_FILE).is_file():
        return None
    speed = read_history(run_dir).pooled("real_tokens_per_s")
    return speed if speed > 0 else None
