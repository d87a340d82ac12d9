"""``paceline report``: one HTML file that explains a run, or compares several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.cli import command
from paceline.errors import ConfigError

DESCRIPTION = """Write one self-contained HTML file that explains a run, or compares several.

Examples:
  paceline report runs/first
  paceline report runs/first runs/second --out both.html
  paceline report runs/first --watch                        # a page that renews itself while the run trains
"""


@dataclass
class Arguments:
    """Which runs, and where the report goes."""

    runs: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Directory of the run, finished or not; several are compared with the first."""
    out: Path | None = None
    """HTML file to write. Unset: report.html in the run directory, comparison.html here for several runs."""
    watch: bool = False
    """Serve the report of one run on this machine instead, at an address that is printed; Ctrl-C ends it."""
    port: int = 0
    """Where --watch listens. 0: any free port."""


def run(argv: Sequence[str]) -> int:
    """Write the report and say where it is."""
    arguments, _ = command.parse(Arguments, argv, prog="paceline report", description=DESCRIPTION)
    if not arguments.runs:
        raise ConfigError("paceline report: no run given; give the directory of a run, for example runs/first")
    if arguments.watch:
        return _watch(arguments)
    if arguments.port:
        raise ConfigError("--port: only --watch listens anywhere; add --watch or leave it out")
    if len(arguments.runs) > 1:
        from paceline.report.comparison import COMPARISON_FILE, write_comparison

        path = write_comparison(arguments.runs, arguments.out or Path(COMPARISON_FILE))
    else:
        from paceline.report.report import write_report

        path = write_report(arguments.runs[0], arguments.out)
    command.stdout.print(str(path), markup=False)
    return 0


def _watch(arguments: Arguments) -> int:
    if len(arguments.runs) > 1 or arguments.out is not None:
        raise ConfigError("--watch: serves the report of one run and writes no file; give one run, without --out")
    from paceline.report.server import REFRESH_S, report_server

    with report_server(arguments.runs[0], arguments.port) as server:
        address = f"http://{server.server_name}:{server.server_port}/"
        command.stdout.print(f"{address} (renewed every {REFRESH_S} s; Ctrl-C ends it)", markup=False)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
