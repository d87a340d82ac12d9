"""``paceline check``: pre-flight of one run, in minutes, before hours are spent."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.text import Text

from paceline.atomic_files import write_text
from paceline.cli import command
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.check.results import CheckResult

DESCRIPTION = """Check one run before it is started: target, taps, chat template, masks, mask token, an overfit of a few
samples, real decoding, the largest batch, memory, time, cost, and how to split the devices. Each line passes, warns or
fails, and says what to do. Nothing of the run is written.

With --gpu a device is accepted instead: numbers against the CPU, whole small runs, speed of the parts, the pipeline.

Examples:
  paceline check run.yaml
  paceline check --gpu cuda:0 --out gpu.json
  paceline check run.yaml --price 2.5 --flow.target-devices "[cuda:0, cuda:1]"
"""

STYLES = {"pass": "green", "warn": "bold yellow", "fail": "bold red", "skipped": "dim"}


@dataclass
class Arguments:
    """What to check, and how thoroughly."""

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """Settings file of a run, or a run directory."""
    gpu: str | None = None
    """Accept this device, for example cuda:0, instead of checking a run; 10 to 35 minutes on a card."""
    stages: str = "ABCD"
    """With --gpu: which stages; A numbers, B runs, C speed, D pipeline."""
    tiny: bool = False
    """With --gpu: small sizes, as on a CPU."""
    out: Path | None = None
    """With --gpu: also write the results there, as JSON."""
    rows: int = 256
    """About how many rows of the training files are tokenized."""
    seconds: float = 120.0
    """Longest time of the overfit."""
    price: float | None = None
    """Of one device for one hour; shows what the run will cost."""
    json: bool = False
    """Print the results as JSON on standard output."""


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
    if arguments.gpu is not None:
        return _accept(arguments, arguments.gpu)
    if arguments.run is None:
        raise ConfigError("RUN: not given; for example: paceline check run.yaml")
    settings = command.read_settings(arguments.run, overrides)
    from paceline.check.context import CheckLimits
    from paceline.check.preflight import preflight

    limits = CheckLimits(rows=arguments.rows, seconds=arguments.seconds, price=arguments.price)
    with command.stderr.status("checking") as status:

        def report(name: str, result: CheckResult | None) -> None:
            status.update(f"checking {name}")
            if result is not None and not arguments.json:
                command.stdout.print(draw(result))

        results = preflight(settings, limits, report)
    failed = sum(result.status == "fail" for result in results)
    if arguments.json:
        command.write_json([result.to_json() for result in results])
    else:
        command.stdout.print(_summary(results))
    return 1 if failed else 0


def _accept(arguments: Arguments, device: str) -> int:
    """Run the acceptance of a device; exit code 1 when a check fails."""
    from paceline.check.gpu import gpu_checks
    from paceline.device import why_missing

    errors = [] if set(arguments.stages) <= set("ABCD") else [f"--stages {arguments.stages}: letters of A, B, C, D"]
    if reason := why_missing(device):
        errors.append(f"--gpu {reason}")
    elif device == "cpu" and not arguments.tiny:
        errors.append("--gpu cpu: the sizes are those of a card; add --tiny")
    if arguments.run is not None:
        errors.append(f"{arguments.run}: --gpu looks at a device, not at a run; give one of them")
    if errors:
        raise ConfigError(*errors)
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as folder, command.stderr.status("checking") as status:

        def report(name: str, result: CheckResult | None) -> None:
            status.update(f"checking {name}")
            if result is not None and not arguments.json:
                command.stdout.print(draw(result))

        found = gpu_checks(device, arguments.stages, Path(folder), report, tiny=arguments.tiny)
    if arguments.out is not None:
        write_text(arguments.out, json.dumps(found, indent=1) + "\n")
    if arguments.json:
        command.write_json(found)
    return 1 if any(result["status"] == "fail" for result in found["results"]) else 0


def draw(result: CheckResult) -> Text:
    """A result as a line or two."""
    text = Text()
    text.append(f"{result.status:<8}", style=STYLES[result.status])
    text.append(f"{result.name:<11} ", style="bold")
    text.append(result.detail)
    if result.advice:
        text.append(f"\n{'':<19}→ {result.advice}", style=STYLES[result.status] if result.status != "pass" else "dim")
    return text


def _summary(results: Sequence[CheckResult]) -> str:
    counts = {status: sum(result.status == status for result in results) for status in STYLES}
    seconds = sum(result.seconds for result in results)
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    after = "fix what fails first" if counts["fail"] else "next: paceline train"
    return f"\n{said} in {seconds:.0f} s; {after}"
