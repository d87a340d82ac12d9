"""How ``paceline plan`` shows a forecast on a terminal: histogram, bucket table, facts, edges, comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.plan.edges import Edges, all_distinct
from paceline.plan.forecast import Forecast
from paceline.plan.metrics import Kept
from paceline.text import duration

BARS = 18
"""Lines of the length histogram."""


def render(forecast: Forecast, lengths: np.ndarray) -> RenderableType:
    """The forecast of one plan, with a histogram of the lengths that it was made from, for a terminal."""
    parts: list[RenderableType] = [_headline(forecast), Text()]
    parts += [_histogram(lengths[lengths <= forecast.quantiles["P100"]])]
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


def _histogram(lengths: np.ndarray) -> Text:
    step = -(-int(lengths.max()) // BARS)
    step = next((nice for nice in (1, 2, 5, 8, 16, 32, 64, 128, 256, 512) if nice >= step), -(-step // 512) * 512)
    counts = np.bincount((lengths.astype(np.int64) - 1) // step).tolist()
    width = len(f"{len(counts) * step:,}")
    lines = []
    for number, count in enumerate(counts):
        eighths = count * 40 * 8 // max(counts)
        bar = "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
        low, high = number * step + 1, (number + 1) * step
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
            percent(row.efficiency),
            percent(row.share_samples),
            Text(percent(row.share_batches), style=loud),
            percent(row.share_tokens),
            *(percent(row.share_weight[name]) for name in ("token", "anchor", "sample")),
        )
    return table


def percent(value: float) -> str:
    """One decimal, because efficiencies differ by tenths of a percent; – for what does not exist."""
    return "–" if value != value else f"{value:.1%}"


def number(value: float, digits: int = 1) -> str:
    """With thousands separators; – for what does not exist."""
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
        table.add_row("time", f"{duration(forecast.seconds)} for {forecast.epochs} epochs at the given speed")
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
        f"{number(forecast.step_deviation_tokens)} tokens around a mean length of {number(forecast.mean_tokens, 0)}, "
        f"each sample weighed by {forecast.weighting} as in the loss (the length-driven part of its noise)",
    )
    table.add_row(
        "",
        f"{number(forecast.batch_mean_deviation_tokens)} tokens if batches were averaged as equals",
    )
    again = "–" if forecast.repairing != forecast.repairing else f"{forecast.repairing:.2%}"
    table.add_row("re-pairing", f"{again} of the batch-mates meet again in the next epoch")
    if forecast.replicas > 1:
        table.add_row("balance", f"slowest replica has {forecast.cost_spread:.3f} times the mean work of a window")
    table.add_row("fingerprint", forecast.fingerprint)
    return table


def render_kept(kept: Sequence[Kept]) -> RenderableType:
    """What each longest length would keep."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("data.max_length", "samples", "", "tokens", ""):
        table.add_column(head, justify="right")
    for row in kept:
        table.add_row(
            f"{row.max_length:,}",
            f"{row.samples:,}",
            percent(row.share_samples),
            f"{row.tokens:,}",
            percent(row.share_tokens),
        )
    return Group(Text("\nwhat a longest sample of so many tokens would keep", style="bold"), table)


def render_edges(ladder: Sequence[Edges], real_tokens: int, num_buckets: int, window_size: int) -> RenderableType:
    """The best edges by number of buckets up to ``num_buckets``, and the fewest for windows of different ones only."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("buckets", justify="right")
    table.add_column("real /\npadded", justify="right")
    table.add_column("largest,\nof batches", justify="right")
    table.add_column("best edges (strategy bucketed)")
    for made in ladder[:num_buckets]:
        edges = ", ".join(map(str, made.edges.tolist()))
        efficiency = real_tokens / made.padded_tokens
        table.add_row(str(len(made.edges)), percent(efficiency), percent(made.largest_share), edges)
    distinct = all_distinct(ladder, window_size)
    text = (
        f"no number of buckets up to {len(ladder)} lets every window of {window_size} hold different ones only"
        if distinct is None
        else f"{len(distinct.edges)} buckets are the fewest with which every window of {window_size} can hold "
        f"different ones only: {', '.join(map(str, distinct.edges.tolist()))}"
    )
    return Group(Text(), table, Text(text))
