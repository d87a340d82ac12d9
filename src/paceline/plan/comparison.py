"""Every strategy and schedule side by side: measured on the same lengths, and shown on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.config.schema import PlanConfig, Schedule, Strategy
from paceline.errors import PlanError
from paceline.plan.epoch import EpochPlan
from paceline.plan.forecast import Forecast, Weighting, describe
from paceline.plan.metrics import repairing
from paceline.plan.views import number, percent


@dataclass(frozen=True, slots=True)
class Comparison:
    """What each strategy promises.

    Attributes:
        forecasts: strategy → a forecast of one epoch for every schedule.
        seconds: strategy → time that its plan took.
        refused: strategy → why the settings allow no such plan.
    """

    forecasts: dict[str, list[Forecast]]
    seconds: dict[str, float]
    refused: dict[str, str]

    @property
    def all(self) -> list[Forecast]:
        """All forecasts, strategy by strategy."""
        return [made for group in self.forecasts.values() for made in group]


def compare(
    plan_of: Callable[[PlanConfig, int], EpochPlan], settings: PlanConfig, weighting: Weighting = "token"
) -> Comparison:
    """Plans one epoch with every strategy and schedule.

    Args:
        plan_of: the plan of an epoch with some settings.
        settings: of which strategy and schedule are replaced.
        weighting: what counts equally in the loss of a step.

    Raises:
        PlanError: the settings allow no plan with any strategy.
    """
    made = Comparison({}, {}, {})
    for strategy in get_args(Strategy):
        chosen = settings.model_copy(update={"strategy": strategy})
        try:
            first = plan_of(chosen, 0)
            started = time.perf_counter()
            second = plan_of(chosen, 1)
            made.seconds[strategy] = time.perf_counter() - started
        except PlanError as error:
            made.refused[strategy] = str(error)
            continue
        again = repairing(first, second)
        made.forecasts[strategy] = [
            describe(plan, again, [plan.num_windows], weighting=weighting)
            for plan in map(first.rescheduled, get_args(Schedule))
        ]
    if not made.forecasts:
        raise PlanError(*dict.fromkeys(made.refused.values()))
    return made


def render_comparison(comparison: Comparison) -> RenderableType:
    """Strategies side by side, then what each schedule makes of them."""
    rows = comparison.forecasts
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
            Text(percent(made.repairing), style="yellow" if made.repairing > 0.5 else ""),
            f"{1000 * comparison.seconds[name]:,.0f}",
        )
    calmest = min(made.step_deviation_tokens for group in rows.values() for made in group)
    noise = _by_schedule(
        rows,
        lambda made: Text(
            number(made.step_deviation_tokens, 0),
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
        _recommended(comparison.all),
        *(Text.assemble((f"{name} left out: ", "bold yellow"), why) for name, why in comparison.refused.items()),
    )


def _recommended(forecasts: Sequence[Forecast]) -> Text:
    """Least padding among the plans that the trainer can use and that are composed anew; of equals, the calmest."""
    usable = [made for made in forecasts if made.strategy != "packed" and made.repairing < 0.5] or list(forecasts)
    best = min(usable, key=lambda made: (-round(made.efficiency, 3), made.step_deviation_tokens))
    return Text.assemble(
        "least padding with padded batches that are new every epoch: ",
        (f"{best.strategy} × {best.schedule}", "bold green"),
        f" ({best.efficiency:.1%} real, step σ {number(best.step_deviation_tokens, 0)} tokens)",
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
