"""A run's report that renews itself while the run trains: served on this machine only, rendered anew on changes."""

from __future__ import annotations

import http.server
from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from paceline.errors import RunDirectoryError
from paceline.observe.run_history import read_history
from paceline.report.report import render
from paceline.text import first_line

HOST = "127.0.0.1"
REFRESH_S = 10
"""Seconds after which the browser asks again."""
_FILES = ("metrics.jsonl", "evaluation.json", "settings.yaml", "run.json")


class LiveReport:
    """Renders a run's page again where one of its files has changed since."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._seen: tuple[float, ...] = ()
        self._page = b""

    def page(self) -> bytes:
        """The page as it is now.

        Raises:
            RunDirectoryError: there is nothing of a run in the directory.
        """
        paths = (self._run_dir / name for name in _FILES)
        seen = tuple(path.stat().st_mtime if path.exists() else 0.0 for path in paths)
        if seen != self._seen or not self._page:
            self._page = render(read_history(self._run_dir), refresh_s=REFRESH_S).encode()
            self._seen = seen
        return self._page


@contextmanager
def report_server(run_dir: Path, port: int = 0) -> Generator[http.server.HTTPServer]:
    """A server of the run's report on 127.0.0.1; ``serve_forever`` is the caller's.

    Args:
        run_dir: directory of a run.
        port: to listen at; 0 for any that is free.

    Raises:
        RunDirectoryError: no run in there, or the port cannot be used.
    """
    report = LiveReport(run_dir)
    report.page()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """The page, for requests to this machine by its own name."""
            # A page elsewhere may make a browser call this address by another name; it gets nothing.
            name = self.headers.get("Host", "").partition(":")[0]
            if self.path != "/" or name not in (HOST, "localhost"):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            try:
                body = report.page()
            except RunDirectoryError as error:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the run cannot be read", str(error))
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """The terminal stays quiet."""

    try:
        server = http.server.HTTPServer((HOST, port), Handler)
    except OSError as error:
        raise RunDirectoryError(f"--port {port}: cannot be used ({first_line(error)}); give another one") from error
    with server:
        yield server
