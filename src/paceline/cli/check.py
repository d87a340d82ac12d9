"""``paceline check``: pre-flight of one run, in minutes, before hours are spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.text import Text

from paceline.checkpoint.run_directory import is_run_directory, read_run_settings
from paceline.cli import command
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.check.results import CheckResult

DESCRIPTION = """Check one run before it is started: target, taps, chat template, masks, mask token, an overfit of a few
samples, real decoding, the largest batch, memory, time, cost, and how to split the devices. Each line passes, warns or
fails, and says what to do. Nothing of the run is written.

Examples:
  paceline check run.yaml
  paceline check run.yaml --price 2.5 --flow.target-devices "[cuda:0, cuda:1]"
"""

STYLES = {"pass": "green", "warn": "bold yellow", "fail": "bold red", "skipped": "dim"}


@dataclass
class Arguments:
    """What to check, and how thoroughly."""

    run: Annotated[Path, tyro.conf.Positional]
    """Settings file of a run, or a run directory."""
    rows: int = 256
    """About how many rows of the training files are tokenized."""
    seconds: float = 120.0
    """Longest time of the overfit."""
    price: float | None = None
    """Of one device for one hour; shows what the run will cost."""
    json: bool = False
    """Print the findings as JSON on standard output."""


def run(argv: Sequence[str]) -> int:
    """Check; exit code 1 when a check fails."""
    arguments, overrides = command.parse(Arguments, argv, prog="paceline check", description=DESCRIPTION, settings=True)
    errors = [
        f"--{name} {value}: must be more than 0"
        for name, value in (("rows", arguments.rows), ("seconds", arguments.seconds), ("price", arguments.price))
        if value is not None and not value > 0
    ]
    if errors:
        raise ConfigError(*errors)
    if is_run_directory(arguments.run):
        settings = read_run_settings(arguments.run, overrides)
    else:
        settings = command.read_settings(str(arguments.run), overrides)
    from paceline.check.context import CheckLimits
    from paceline.check.preflight import preflight

    limits = CheckLimits(rows=arguments.rows, seconds=arguments.seconds, price=arguments.price)
    with command.stderr.status("checking") as status:

        def hear(name: str, finding: CheckResult | None) -> None:
            status.update(f"checking {name}")
            if finding is not None and not arguments.json:
                command.stdout.print(draw(finding))

        findings = preflight(settings, limits, hear)
    failed = sum(finding.status == "fail" for finding in findings)
    if arguments.json:
        command.write_json([finding.to_json() for finding in findings])
    else:
        command.stdout.print(_summary(findings))
    return 1 if failed else 0


def draw(finding: CheckResult) -> Text:
    """A finding as a line or two."""
    text = Text()
    text.append(f"{finding.status:<8}", style=STYLES[finding.status])
    text.append(f"{finding.name:<11}", style="bold")
    text.append(finding.detail)
    if finding.advice:
        text.append(
            f"\n{'':<19}→ {finding.advice}", style=STYLES[finding.status] if finding.status != "pass" else "dim"
        )
    return text


def _summary(findings: Sequence[CheckResult]) -> str:
    counts = {status: sum(finding.status == status for finding in findings) for status in STYLES}
    seconds = sum(finding.seconds for finding in findings)
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    after = "mend what fails first" if counts["fail"] else "next: paceline train"
    return f"\n{said} in {seconds:.0f} s; {after}"
