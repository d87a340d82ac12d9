"""The report that renews itself: only on this machine, only as itself, rendered anew when the run has changed."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.cli import report as command
from paceline.cli.command import guarded
from paceline.errors import RunDirectoryError
from paceline.report import server
from paceline.report.server import LiveReport, report_server

MakeRun = Callable[..., Path]


@contextmanager
def serving(run_dir: Path) -> Generator[int]:
    with report_server(run_dir) as found:
        assert found.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield found.server_port
        finally:
            found.shutdown()
            thread.join()


def answer(port: int, path: str = "/", host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Host": f"{host}:{port}"})
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


def test_the_page_follows_the_run(make_run: MakeRun) -> None:
    run_dir = make_run(steps=4)
    path = run_dir / "metrics.jsonl"
    text = path.read_text()
    path.write_text("".join(text.splitlines(keepends=True)[:3]))
    with serving(run_dir) as port:
        status, page = answer(port)
        assert status == 200 and '<meta http-equiv="refresh" content="10">' in page and "<dd>2<small>" in page
        path.write_text(text)
        assert "<dd>4<small>of 4 · finished" in answer(port)[1]
        path.unlink()
        for name in ("settings.yaml", "run.json"):
            (run_dir / name).unlink()
        assert answer(port)[0] == 503


def test_nothing_else_is_served(make_run: MakeRun) -> None:
    with serving(make_run(steps=2)) as port:
        assert answer(port, "/settings.yaml")[0] == answer(port, "/../run.json")[0] == 404
        assert answer(port, host="other.example")[0] == 404 and answer(port, host="localhost")[0] == 200


def test_a_page_is_rendered_once_for_each_state(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, rendered = make_run(steps=2), []
    monkeypatch.setattr(server, "render", lambda run, refresh_s: rendered.append(run.steps.size) or "page")
    report = LiveReport(run_dir)
    assert report.page() == report.page() == b"page" and rendered == [2]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("\n")
    report.page()
    assert rendered == [2, 2]


def test_wrong_calls_are_one_line_each(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(steps=2)
    for words, phrase in (
        ([str(run_dir), str(run_dir), "--watch"], "--watch: serves the report of one run"),
        ([str(run_dir), "--watch", "--out", "x.html"], "--watch: serves the report of one run"),
        ([str(run_dir), "--port", "80"], "--port: only --watch listens anywhere"),
        ([str(tmp_path / "none"), "--watch"], "no such folder; give the directory of a run"),
    ):
        assert guarded(command.run, words) in (1, 2)
        assert phrase in capsys.readouterr().err
    taken = report_server(run_dir)
    refused = pytest.raises(RunDirectoryError, match=r"--port \d+: cannot be used")
    with taken as first, refused, report_server(run_dir, first.server_port):
        raise AssertionError("two servers at one port")
