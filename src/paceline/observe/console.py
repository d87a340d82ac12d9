"""What the person at the terminal sees: a live bar, plain lines, or only warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from paceline.config import ObserveConfig
from paceline.observe.metrics_file import StepLine
from paceline.text import duration, percent, short

Values = Mapping[str, float | None]


class View(Protocol):
    """The face of an observer."""

    def advance(self, step: int) -> None:
        """One more optimizer step is done."""
        ...

    def show(self, line: StepLine) -> None:
        """The newest numbers."""
        ...

    def note(self, text: str) -> None:
        """Something that happened."""
        ...

    def warn(self, text: str) -> None:
        """Something that the user should look at."""
        ...

    def close(self, status: str) -> None:
        """The run is over."""
        ...


def open_view(settings: ObserveConfig, console: Console, *, total_steps: int, first_step: int) -> View:
    """The view that the settings ask for; ``auto`` looks at whether the console is a terminal."""
    kind = settings.console
    if kind == "auto":
        kind = "rich" if console.is_terminal else "plain"
    if kind == "quiet":
        return QuietView(console)
    if kind == "rich":
        return LiveView(console, total_steps=total_steps, first_step=first_step)
    return PlainView(console, total_steps=total_steps, every_s=settings.plain_every_s)


class QuietView:
    """Warnings only."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def advance(self, step: int) -> None:
        """Nothing to show."""

    def show(self, line: StepLine) -> None:
        """Nothing to show."""

    def note(self, text: str) -> None:
        """Nothing to show."""

    def warn(self, text: str) -> None:
        """One line, marked."""
        self._console.print(f"[bold yellow]warning:[/] {escape(text)}")

    def close(self, status: str) -> None:
        """Nothing to show."""


class PlainView(QuietView):
    """One line now and then, for logs: the first step, the last one, and every ``every_s`` seconds of training."""

    def __init__(self, console: Console, *, total_steps: int, every_s: float) -> None:
        super().__init__(console)
        self._total_steps = total_steps
        self._every_s = every_s
        self._since_s: float | None = None
        self._pending: StepLine | None = None

    def show(self, line: StepLine) -> None:
        """Print the line if its time has come, else keep it in case it is the last."""
        seconds = (line.values.get("speed/seconds_per_step") or 0.0) * line.steps
        due = self._since_s is None or line.step >= self._total_steps
        self._since_s = (self._since_s or 0.0) + seconds
        self._pending = line
        if due or self._since_s >= self._every_s:
            self._print()

    def note(self, text: str) -> None:
        """One line."""
        self._console.print(escape(text))

    def close(self, status: str) -> None:
        """Print the last step if it was held back, and how the run ended."""
        if self._pending is not None:
            self._print()
        self._console.print(f"training {escape(status)}")

    def _print(self) -> None:
        line = self._pending
        if line is not None:
            head = f"step {line.step}/{self._total_steps}"
            self._console.print(escape(" · ".join([head, *numbers(line.values), *stages(line.values)])))
        self._pending = None
        self._since_s = 0.0


class LiveView(QuietView):
    """Progress bar, current numbers and stage shares, redrawn in place; notes and warnings scroll above."""

    def __init__(self, console: Console, *, total_steps: int, first_step: int) -> None:
        super().__init__(console)
        self._values: Values = {}
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[left]} left"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("training", total=total_steps, completed=first_step, left="–")
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)
        self._live.start()

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def show(self, line: StepLine) -> None:
        """Keep the newest numbers for the next redraw."""
        self._values = line.values
        left = duration(line.values.get("progress/time_left_s"))
        self._progress.update(self._task, completed=line.step, left=left)

    def note(self, text: str) -> None:
        """One line above the bar."""
        self._console.print(escape(text))

    def close(self, status: str) -> None:
        """Leave the last state on the screen."""
        self._live.stop()
        self._console.print(f"training {escape(status)}")

    def _render(self) -> Group:
        rows = [" · ".join(numbers(self._values)), " · ".join(stages(self._values))]
        return Group(self._progress, *(Text("  " + row, style="dim", overflow="fold") for row in rows if row))


def numbers(values: Values) -> list[str]:
    """The headline numbers that are there, as short phrases."""
    phrases = (
        ("loss", "loss {}", "{:.3f}".format),
        ("tau", "τ {}", "{:.2f}".format),
        ("real_tokens_per_s", "{} real tokens/s", short),
        ("draft_positions_per_s", "{} draft positions/s", short),
        ("padding_efficiency", "{} real", percent),
        ("gradient/norm", "gradient {}", short),
        ("learning_rate", "lr {}", short),
    )
    found = [text.format(form(values[name])) for name, text, form in phrases if values.get(name) is not None]
    if values.get("gradient/skipped"):
        found.append("step skipped")
    return found


def stages(values: Values) -> list[str]:
    """Shares of each stage's time, as ``target 80 % busy, 20 % starved``."""
    shares: dict[str, list[str]] = {}
    for name, value in values.items():
        group, _, rest = name.partition("/")
        stage, _, state = rest.rpartition("/")
        if group == "stage" and stage and value is not None and (state == "busy" or value >= 0.005):
            shares.setdefault(stage, []).append(f"{percent(value)} {state}")
    return [f"{stage} {', '.join(parts)}" for stage, parts in shares.items()]
