"""``paceline report``: one HTML file that explains a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.cli import frame


@dataclass
class Arguments:
    """Which run, and where the report goes."""

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of the run, finished or not."""
    out: Path | None = None
    """HTML file to write. Unset: report.html in the run directory."""


def run(argv: Sequence[str]) -> int:
    """Write the report and say where it is."""
    arguments, _ = frame.parse(
        Arguments,
        argv,
        prog="paceline report",
        description="Write one self-contained HTML file that explains a run.\n\nExample: paceline report runs/first",
    )
    from paceline.observe.report import write_report

    path = write_report(arguments.run, arguments.out)
    frame.stdout.print(str(path), markup=False)
    return 0
