"""``paceline report``: one HTML file that explains a run, or compares several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.cli import command
from paceline.errors import ConfigError


@dataclass
class Arguments:
    """Which runs, and where the report goes."""

    runs: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Directory of the run, finished or not; several are compared with the first."""
    out: Path | None = None
    """HTML file to write. Unset: report.html in the run directory, comparison.html here for several runs."""


def run(argv: Sequence[str]) -> int:
    """Write the report and say where it is."""
    arguments, _ = command.parse(
        Arguments,
        argv,
        prog="paceline report",
        description=(
            "Write one self-contained HTML file that explains a run, or compares several.\n\n"
            "Examples: paceline report runs/first\n          paceline report runs/first runs/second --out both.html"
        ),
    )
    if not arguments.runs:
        raise ConfigError("paceline report: no run given; give the directory of a run, for example runs/first")
    if len(arguments.runs) > 1:
        from paceline.report.comparison import COMPARISON_FILE, write_comparison

        path = write_comparison(arguments.runs, arguments.out or Path(COMPARISON_FILE))
    else:
        from paceline.report.report import write_report

        path = write_report(arguments.runs[0], arguments.out)
    command.stdout.print(str(path), markup=False)
    return 0
