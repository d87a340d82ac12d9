"""How ``paceline plan`` shows a forecast on a terminal: histogram, bucket table, facts, edges, comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from paceline.plan.edges import Edges
    from paceline.plan.epoch import EpochPlan
    from paceline.plan.forecast import Forecast

BARS = 18
"""Lines of the length histogram."""


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


def _number(value: float, digits: int = 1) -> str:
    return "–" if value != value else f"{value:,.{digits}f}"


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
            f"three quarters or more from one: {made.crowded:.2%} of the windows, "
            f"{made.crowded_last_tenth:.2%} of the last tenth; "
            f"longest run {made.longest_run:,}",
        )
    table.add_row(
        "step σ",
        f"{_number(forecast.step_deviation_tokens)} tokens around a mean length of {_number(forecast.mean_tokens, 0)}, "
        f"each sample weighed by {forecast.weighting} as in the loss (the length-driven part of its noise)",
    )
    table.add_row(
        "",
        f"{_number(forecast.batch_mean_deviation_tokens)} tokens if batches were averaged as equals",
    )
    again = "–" if forecast.repairing != forecast.repairing else f"{forecast.repairing:.2%}"
    table.add_row("re-pairing", f"{again} of the batch-mates meet again in the next epoch")
    if forecast.replicas > 1:
        table.add_row("balance", f"slowest replica has {forecast.cost_spread:.3f} times the mean work of a window")
    table.add_row("fingerprint", forecast.fingerprint)
    return table


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours:,} h {rest // 60:02d} min" if hours else f"{rest // 60} min {rest % 60:02d} s"


def render_edges(ladder: Sequence[Edges], distinct: Edges | None, window_size: int) -> RenderableType:
    """The best edges by number of buckets, and the fewest buckets for windows of different ones only."""
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
        else f"{len(distinct.edges)} buckets are the fewest with which every window of {window_size} can hold "
        f"different ones only: {', '.join(map(str, distinct.edges.tolist()))}"
    )
    return Group(Text(), table, Text(told))


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
            Text(_percent(made.repairing), style="yellow" if made.repairing > 0.5 else ""),
            f"{1000 * times[name]:,.0f}",
        )
    calmest = min(made.step_deviation_tokens for group in rows.values() for made in group)
    noise = _by_schedule(
        rows,
        lambda made: Text(
            _number(made.step_deviation_tokens, 0),
            style="bold green" if made.step_deviation_tokens <= 1.5 * calmest else "",
        ),
    )
    crowds = _by_schedule(rows, _crowded)
    return Group(
        composed,
        Text(
            "\nstep σ in tokens: spread of the steps' mean length, weighed as in the loss (less is calmer)",
            style="bold",
        ),
        noise,
        Text("\nwindows with three quarters or more from one bucket, % of the epoch / of its last tenth", style="bold"),
        crowds,
        Text("\n– every batch mixes all lengths, so buckets say nothing", style="dim"),
        Text("meet again: share of the batch-mates that share a batch in the next epoch too", style="dim"),
        Text(),
        _recommended([made for group in rows.values() for made in group]),
    )


def _recommended(forecasts: Sequence[Forecast]) -> Text:
    """Least padding among the plans that the trainer can use and that are composed anew; of equals, the calmest."""
    usable = [made for made in forecasts if made.strategy != "packed" and made.repairing < 0.5] or list(forecasts)
    best = min(usable, key=lambda made: (-round(made.efficiency, 3), made.step_deviation_tokens))
    return Text.assemble(
        "least padding with padded batches that are new every epoch: ",
        (f"{best.strategy} × {best.schedule}", "bold green"),
        f" ({best.efficiency:.1%} real, step σ {_number(best.step_deviation_tokens, 0)} tokens)",
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
