"""``paceline plan``: what an epoch will look like, from lengths alone: buckets, padding, windows, steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import tyro
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paceline.cli import frame
from paceline.config import Settings, load_settings
from paceline.config.plan import PlanConfig, Schedule, Strategy
from paceline.errors import ConfigError, PlanError

if TYPE_CHECKING:
    import numpy as np

    from paceline.plan.edges import Edges
    from paceline.plan.epoch import EpochPlan
    from paceline.plan.forecast import Forecast
    from paceline.plan.intake import Groups

DESCRIPTION = """Dry run of an epoch: length histogram, buckets, padding, windows, steps. Needs nothing but lengths.

SOURCE is a run's YAML, a prepared store, or a file of lengths: .npy, .npz, .jsonl, .parquet, or text with one length a
line.

Examples: paceline plan run.yaml
          paceline plan lengths.npy --compare
          paceline plan lengths.npy --plan.token_budget 16384 --plan.strategy bucketed --plot plan.png"""

BARS = 18
"""Lines of the length histogram."""


@dataclass
class Arguments:
    """Whose epoch, and how it is shown."""

    source: Annotated[str, tyro.conf.Positional]
    """Run's YAML, prepared store, or file of lengths."""
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
    """Drafter replicas that share every window. Unset: those of the YAML, else 1."""
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
    arguments, overrides = frame.parse(Arguments, argv, prog="paceline plan", description=DESCRIPTION, settings=True)
    _check(arguments)
    source = read_source(arguments, overrides)
    if arguments.compare:
        return _run_compare(arguments, source)
    from paceline.plan.epoch import plan_epoch
    from paceline.plan.forecast import describe

    plans: list[EpochPlan] = []
    with frame.stderr.status("planning"):
        windows = []
        for epoch in range(max(source.epochs, 2)):
            plan = plan_epoch(source.lengths, source.eligible, source.settings.plan, epoch=epoch, **_shape(source))
            plans += [plan] if epoch < 2 else []
            windows.append(plan.num_windows)
        forecast = describe(plans[0], plans[1], windows[2:], source.epochs, arguments.tokens_per_s)
    if arguments.plot is not None:
        from paceline.plan.draw import draw_plan

        draw_plan(plans[0], forecast, Path(arguments.plot))
    ladder, distinct = _ladder(plans[0]) if arguments.edges else ([], None)
    if arguments.json:
        frame.write_json(forecast.to_dict() | ({"best_edges": _edges_json(ladder, distinct)} if ladder else {}))
        return 0
    frame.stdout.print(render(forecast, histogram=histogram(plans[0])))
    if ladder:
        frame.stdout.print(_render_edges(ladder, distinct, plans[0].window_size))
    if arguments.plot is not None:
        frame.stdout.print(f"drawn: {escape(arguments.plot)}")
    return 0


def _check(arguments: Arguments) -> None:
    faults = [
        f"--{name.replace('_', '-')} {value}: must be more than 0"
        for name, value in (
            ("epochs", arguments.epochs),
            ("replicas", arguments.replicas),
            ("tokens_per_s", arguments.tokens_per_s),
        )
        if value is not None and not value > 0
    ]
    if arguments.plot is not None and Path(arguments.plot).suffix.lower() not in (".png", ".svg"):
        faults.append(f"--plot {arguments.plot}: a picture is written as .png or .svg; name the file so")
    if faults:
        raise ConfigError(*faults)


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
    """Lengths and settings of a run's YAML, a store, or a file of lengths.

    Raises:
        ConfigError, DataError, PlanError: what cannot be read; one line each.
    """
    path = Path(arguments.source)
    is_run = path.suffix.lower() in (".yaml", ".yml")
    if is_run:
        settings = load_settings(path, overrides)
    else:
        settings = load_settings(None, {"run_dir": "unused", "target.path": "unused", **overrides})
    replicas = arguments.replicas or (len(settings.flow.drafter_devices) if is_run else 1)
    epochs = arguments.epochs or (settings.train.epochs if is_run else 1)
    if is_run or path.is_dir():
        if arguments.column is not None or arguments.group is not None:
            raise PlanError("--column and --group belong to a file of lengths; a store has its own columns")
        from paceline.data.store import open_store

        folder = Path(settings.store_path) if is_run else path
        store = open_store(folder)
        groups = _store_groups(folder, settings.plan.weights) if settings.plan.weights else None
        return Source(str(path), settings, store.lengths, store.eligible, groups, epochs, replicas)
    from paceline.plan.files import read_lengths

    file = read_lengths(path, arguments.column, arguments.group)
    return Source(str(path), settings, file.lengths, file.eligible, file.groups, epochs, replicas)


def _store_groups(folder: Path, weights: dict[str, float]) -> Groups:
    from paceline.data.store import INDEX, read_manifest, read_table
    from paceline.plan.intake import groups_of_tags

    index = read_table(folder / INDEX)
    names = [source["path"] for source in read_manifest(folder)["sources"]]
    rows = zip(index["tags"].to_pylist(), index["source"].to_pylist(), strict=True)
    return groups_of_tags([[*(tags.split(",") if tags else []), names[source]] for tags, source in rows], weights)


def histogram(plan: EpochPlan) -> list[tuple[int, int, int]]:
    """Samples by length as (low, high, count), both ends included, at most `BARS` of them."""
    import numpy as np

    top = int(plan.edges[-1])
    step = -(-top // BARS)
    step = next((nice for nice in (1, 2, 5, 8, 16, 32, 64, 128, 256, 512) if nice >= step), -(-step // 512) * 512)
    lengths = plan.lengths[plan.lengths <= top]
    counts = np.bincount((lengths.astype(np.int64) - 1) // step)
    return [(number * step + 1, (number + 1) * step, int(count)) for number, count in enumerate(counts)]


def render(forecast: Forecast, histogram: Sequence[tuple[int, int, int]] = ()) -> RenderableType:
    """The forecast of one plan for a terminal."""
    parts: list[RenderableType] = [_headline(forecast)]
    if histogram:
        parts += [Text(), _bars(histogram)]
    parts += [Text(), _bucket_table(forecast), Text(), _facts(forecast)]
    for warning in forecast.warnings:
        parts += [Text.assemble(("! ", "bold yellow"), warning)]
    return Group(*parts)


def _headline(forecast: Forecast) -> Text:
    lengths = ", ".join(f"{name} {value:,}" for name, value in forecast.quantiles.items())
    return Text.assemble(
        (f"{forecast.strategy} × {forecast.schedule}", "bold"),
        f": {forecast.num_samples:,} of {forecast.num_rows:,} samples in {forecast.num_batches:,} micro-batches, ",
        (
            f"{forecast.efficiency:.2%} of the padded tokens are real",
            "bold green" if forecast.efficiency > 0.95 else "",
        ),
        f"\nlengths: {lengths}",
    )


def _bars(histogram: Sequence[tuple[int, int, int]]) -> Text:
    most = max(count for *_, count in histogram)
    width = len(f"{histogram[-1][1]:,}")
    lines = []
    for low, high, count in histogram:
        eighths = count * 40 * 8 // most
        bar = "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
        lines.append(f"{low:>{width},}–{high:<{width},} {count:>11,} {bar or ('▏' if count else '')}")
    return Text("\n".join(lines))


def _bucket_table(forecast: Forecast) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("tokens of\na sample", justify="right", no_wrap=True)
    for head in ("samples", "batches", "real /\npadded", "share of\nsamples", "of\nbatches", "of\ntokens"):
        table.add_column(head, justify="right", no_wrap=True)
    for head in ("weight\nby token", "by\nanchor", "by\nsample"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in forecast.buckets:
        loud = "yellow" if row.share_batches > 1.5 * row.share_samples else ""
        table.add_row(
            f"{row.low}–{row.high}",
            f"{row.samples:,}",
            f"{row.batches:,}",
            _percent(row.efficiency),
            _percent(row.share_samples),
            Text(_percent(row.share_batches), style=loud),
            _percent(row.share_tokens),
            *(_percent(row.share_weight[name]) for name in ("token", "anchor", "sample")),
        )
    return table


def _percent(value: float) -> str:
    return "–" if value != value else f"{value:.1%}"


def _facts(forecast: Forecast) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    window = f"{forecast.accumulate} micro-batches" + (
        f" × {forecast.replicas} replicas" if forecast.replicas > 1 else ""
    )
    short = f", the last one short ({forecast.short_window})" if forecast.short_window else ""
    carried = f", {forecast.carried_out:,} samples carried into the next epoch" if forecast.carried_out else ""
    table.add_row("steps", f"{forecast.num_windows:,} an epoch of {window}{short}{carried}")
    if forecast.epochs > 1:
        table.add_row("", f"{forecast.total_windows:,} in {forecast.epochs} epochs")
    if forecast.seconds is not None:
        table.add_row("time", f"{_duration(forecast.seconds)} for {forecast.epochs} epochs at the given speed")
    table.add_row("tokens", f"{forecast.real_tokens:,} real, {forecast.padded_tokens:,} padded an epoch")
    table.add_row("draft positions", f"{forecast.draft_positions:,} an epoch")
    table.add_row("shapes", f"{forecast.shapes:,} (samples × width), {forecast.widths:,} widths")
    if forecast.repeats is None:
        table.add_row("buckets in a window", "every batch mixes all lengths")
    elif forecast.repeats.crowded == forecast.repeats.crowded:
        made = forecast.repeats
        table.add_row(
            "buckets in a window",
            f"{made.mean_distinct:.2f} different ones (at best {made.distinct_bound:.2f}); "
            f"three quarters or more from one: {made.crowded:.2%} of the windows, {made.crowded_last_tenth:.2%} of the last tenth; "
            f"longest run {made.longest_run:,}",
        )
    table.add_row(
        "step σ",
        f"{forecast.step_deviation_tokens:,.1f} tokens around a mean sample length of {forecast.mean_tokens:,.0f} "
        "(the length-driven part of the loss curve's noise)",
    )
    table.add_row("re-pairing", f"{forecast.repairing:.2%} of the batch-mates meet again in the next epoch")
    if forecast.replicas > 1:
        table.add_row("balance", f"slowest replica has {forecast.cost_spread:.3f} times the mean work of a window")
    table.add_row("fingerprint", forecast.fingerprint)
    return table


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours:,} h {rest // 60:02d} min" if hours else f"{rest // 60} min {rest % 60:02d} s"


def _ladder(plan: EpochPlan) -> tuple[list[Edges], Edges | None]:
    """The best edges for every number of buckets up to the settings', and the fewest that allow all-distinct windows."""
    from paceline.plan.edges import edge_ladder, smallest_distinct
    from paceline.plan.limits import Limits

    lengths, limits = plan.lengths[plan.composition.order], Limits.of(plan.settings)
    most = min(plan.settings.num_buckets, len({limits.width(int(length)) for length in set(lengths.tolist())}))
    return edge_ladder(lengths, limits, most), smallest_distinct(lengths, limits, plan.window_size)


def _edges_json(ladder: Sequence[Edges], distinct: Edges | None) -> dict[str, Any]:
    rows = [
        {"edges": made.edges.tolist(), "efficiency": made.efficiency, "largest_share": made.largest_share}
        for made in ladder
    ]
    return {"by_buckets": rows, "smallest_all_distinct": None if distinct is None else len(distinct.edges)}


def _render_edges(ladder: Sequence[Edges], distinct: Edges | None, window_size: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("buckets", justify="right")
    table.add_column("real /\npadded", justify="right")
    table.add_column("largest,\nof batches", justify="right")
    table.add_column("best edges (strategy bucketed)")
    for made in ladder:
        edges = ", ".join(map(str, made.edges.tolist()))
        table.add_row(str(len(made.edges)), _percent(made.efficiency), _percent(made.largest_share), edges)
    told = (
        f"no number of buckets up to 64 lets every window of {window_size} hold different ones only"
        if distinct is None
        else f"{len(distinct.edges)} buckets are the fewest with which every window of {window_size} can hold different "
        f"ones only: {', '.join(map(str, distinct.edges.tolist()))}"
    )
    return Group(Text(), table, Text(told))


def _run_compare(arguments: Arguments, source: Source) -> int:
    from paceline.plan.forecast import describe
    from paceline.plan.measures import repairing

    rows: dict[str, list[Forecast]] = {}
    times: dict[str, float] = {}
    refused: dict[str, str] = {}
    schedules = get_args(Schedule)
    with frame.stderr.status("planning") as status:
        for strategy in get_args(Strategy):
            status.update(f"planning {strategy}")
            settings = source.settings.plan.model_copy(update={"strategy": strategy})
            try:
                plans, following, seconds = _timed_plans(source, settings, schedules)
            except PlanError as fault:
                refused[strategy] = str(fault)
                continue
            again = repairing(plans[0], following)
            rows[strategy] = [
                describe(plan, following, (), 1, arguments.tokens_per_s, repaired=again) for plan in plans
            ]
            times[strategy] = seconds
    if not rows:
        raise PlanError(*dict.fromkeys(refused.values()))
    forecasts = [made for group in rows.values() for made in group]
    if arguments.plot is not None:
        from paceline.plan.draw import draw_comparison

        draw_comparison(forecasts, Path(arguments.plot))
    if arguments.json:
        frame.write_json({"plans": [made.to_dict() for made in forecasts], "plan_s": times, "refused": refused})
        return 0
    frame.stdout.print(render_comparison(rows, times))
    for strategy, why in refused.items():
        frame.stdout.print(Text.assemble((f"{strategy} left out: ", "bold yellow"), why))
    if arguments.plot is not None:
        frame.stdout.print(f"drawn: {escape(arguments.plot)}")
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


def render_comparison(rows: Mapping[str, Sequence[Forecast]], times: Mapping[str, float]) -> RenderableType:
    """Strategies side by side, then what each schedule makes of them."""
    composed = Table(box=None, pad_edge=False, header_style="bold")
    composed.add_column("strategy", style="bold")
    for head in ("real / padded", "micro-batches", "steps", "shapes", "meet again", "plan, ms"):
        composed.add_column(head, justify="right")
    best = max(group[0].efficiency for group in rows.values())
    for name, group in rows.items():
        made = group[0]
        composed.add_row(
            name,
            Text(f"{made.efficiency:.2%}", style="bold green" if made.efficiency == best else ""),
            f"{made.num_batches:,}",
            f"{made.num_windows:,}",
            f"{made.shapes:,}",
            _percent(made.repairing),
            f"{1000 * times[name]:,.0f}",
        )
    calmest = min(made.step_deviation_tokens for group in rows.values() for made in group)
    noise = _by_schedule(
        rows,
        lambda made: Text(
            f"{made.step_deviation_tokens:,.0f}",
            style="bold green" if made.step_deviation_tokens <= 1.5 * calmest else "",
        ),
    )
    crowds = _by_schedule(rows, _crowded)
    return Group(
        composed,
        Text("\nstep σ in tokens: spread of the steps' mean sample length (less is calmer)", style="bold"),
        noise,
        Text("\nwindows with three quarters or more from one bucket, % of the epoch / of its last tenth", style="bold"),
        crowds,
        Text("\n– every batch mixes all lengths, so buckets say nothing", style="dim"),
        Text("meet again: share of the batch-mates that share a batch in the next epoch too", style="dim"),
    )


def _by_schedule(rows: Mapping[str, Sequence[Forecast]], cell: Callable[[Forecast], str | Text]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    for made in next(iter(rows.values())):
        table.add_column(made.schedule, justify="right", no_wrap=True)
    for name, group in rows.items():
        table.add_row(name, *(cell(made) for made in group))
    return table


def _crowded(made: Forecast) -> str | Text:
    if made.repeats is None or made.repeats.crowded != made.repeats.crowded:
        return "–"
    epoch, last = made.repeats.crowded, made.repeats.crowded_last_tenth
    return Text(f"{_whole_percent(epoch)} / {_whole_percent(last)}", style="yellow" if last > 0.2 else "")


def _whole_percent(share: float) -> str:
    return "<1" if 0 < share < 0.01 else f"{100 * share:.0f}"
