"""What the person at the terminal sees: a live bar, plain lines, or only warnings."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from paceline.config import ObserveConfig
from paceline.observe.metrics_file import StepLine
from paceline.text import duration, percent, short

Values = Mapping[str, float | None]


class View:
    """Warnings only; the other views show more."""

    quiet = True

    def __init__(self, console: Console) -> None:
        self._console = console

    def advance(self, step: int) -> None:
        """One more optimizer step is done."""

    def show(self, line: StepLine) -> None:
        """The newest numbers."""

    def note(self, text: str) -> None:
        """Something that happened."""
        if not self.quiet:
            self._console.print(Text(text))

    def warn(self, text: str) -> None:
        """Something that the user should look at."""
        self._console.print(Text.assemble(("warning: ", "bold yellow"), text))

    def close(self, status: str) -> None:
        """The run is over; who started it says why it failed."""
        if not status.startswith("failed"):
            self.note(f"training {status}")


def open_view(settings: ObserveConfig, console: Console, *, total_steps: int, first_step: int) -> View:
    """The view that the settings ask for; ``auto`` looks at whether the console is a terminal."""
    kind = settings.console
    if kind == "auto":
        kind = "rich" if console.is_terminal else "plain"
    if kind == "quiet":
        return View(console)
    if kind == "rich":
        return LiveView(console, total_steps=total_steps, first_step=first_step)
    return PlainView(console, total_steps=total_steps, every_s=settings.plain_every_s)


class PlainView(View):
    """One line now and then, for logs: the first step, the last one, and every ``every_s`` seconds of training."""

    quiet = False

    def __init__(self, console: Console, *, total_steps: int, every_s: float) -> None:
        super().__init__(console)
        self._total_steps = total_steps
        self._every_s = every_s
        self._since_s: float | None = None
        self._pending: StepLine | None = None
        self._seen = HeldOutValue()

    def show(self, line: StepLine) -> None:
        """Print the line if its time has come, else keep it in case it is the last."""
        self._seen.take(line.values)
        seconds = (line.values.get("speed/seconds_per_step") or 0.0) * line.steps
        due = self._since_s is None or line.step >= self._total_steps
        self._since_s = (self._since_s or 0.0) + seconds
        self._pending = line
        if due or self._since_s >= self._every_s:
            self._print()

    def close(self, status: str) -> None:
        """Print the last step if it was held back, and how the run ended."""
        self._print()
        super().close(status)

    def _print(self) -> None:
        line, self._pending, self._since_s = self._pending, None, 0.0
        if line is not None:
            place = [f"step {line.step}/{self._total_steps}", f"epoch {line.epoch + 1}"]
            left = line.values.get("progress/time_left_s")
            place += [f"{duration(left)} left"] if left is not None else []
            self._console.print(Text(" · ".join([*place, *numbers(line.values, self._seen), *stages(line.values)])))


class LiveView(View):
    """Progress bar, current numbers and stage shares, redrawn in place; notes and warnings scroll above."""

    quiet = False

    def __init__(self, console: Console, *, total_steps: int, first_step: int) -> None:
        super().__init__(console)
        self._values: Values = {}
        self._seen = HeldOutValue()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("epoch {task.fields[epoch]}"),
            TextColumn("{task.fields[left]} left"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("training", total=total_steps, completed=first_step, epoch="–", left="–")
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)
        self._live.start()

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def show(self, line: StepLine) -> None:
        """Keep the newest numbers for the next redraw."""
        self._values = line.values
        self._seen.take(line.values)
        left = duration(line.values.get("progress/time_left_s"))
        self._progress.update(self._task, completed=line.step, epoch=line.epoch + 1, left=left)

    def close(self, status: str) -> None:
        """Leave the last state on the screen."""
        self._live.stop()
        super().close(status)

    def _render(self) -> Group:
        rows = [" · ".join(numbers(self._values, self._seen)), " · ".join(stages(self._values))]
        return Group(self._progress, *(Text("  " + row, style="dim", overflow="fold") for row in rows if row))


class HeldOutValue:
    """The newest held-out τ: of real decoding where it is measured, else of the validation batches."""

    def __init__(self) -> None:
        self._decoded: float | None = None
        self._validated: float | None = None

    def take(self, values: Values) -> None:
        """Look for it in a line; most lines have none."""
        self._decoded = values.get("decode/tau") or self._decoded
        self._validated = values.get("validation/tau") or self._validated

    @property
    def tau(self) -> float | None:
        """The newest one; None before the first."""
        return self._decoded if self._decoded is not None else self._validated


def numbers(values: Values, held_out: HeldOutValue) -> list[str]:
    """The headline numbers that are there, as short phrases."""
    phrases = (
        (values.get("loss"), "loss {}", "{:.3f}".format),
        (values.get("tau"), "τ {}", "{:.2f}".format),
        (held_out.tau, "held-out τ {}", "{:.2f}".format),
        (values.get("real_tokens_per_s"), "{} real tokens/s", short),
        (values.get("draft_positions_per_s"), "{} draft positions/s", short),
        (values.get("padding_efficiency"), "{} real", percent),
        (values.get("gradient/norm"), "gradient {}", short),
        (values.get("learning_rate"), "lr {}", short),
    )
    found = [text.format(form(value)) for value, text, form in phrases if value is not None]
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
