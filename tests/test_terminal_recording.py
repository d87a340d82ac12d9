"""Recordings of a terminal: what a command wrote, in its colors, without what is hidden."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
PROGRAM = """
import os
os.write(1, b"\\x1b[32mgreen\\x1b[0m plain\\r\\nin /hid")
os.write(1, b"den/runs <b>\\r\\n1 of 2\\r\\x1b[2K2 of 2\\r\\n")
"""


def recording(project: Path, out: Path, code: str) -> subprocess.CompletedProcess[str]:
    script = project / "scripts" / "terminal_recording.py"
    words = [sys.executable, str(script), str(out), "--typed", "run it", "--every-s", "0", "--hide", "/hidden/"]
    return subprocess.run([*words, "--", sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_recording_shows_what_was_written(project: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.svg"
    done = recording(project, out, PROGRAM)
    assert done.returncode == 0, done.stderr
    svg = ElementTree.parse(out).getroot()
    rows = {group.get("id"): group for group in svg.iter(f"{SVG}g") if group.get("id")}
    *_, last = rows["strip"].findall(f"{SVG}g")
    shown = [rows[str(use.get("href"))[1:]] for use in last.iter(f"{SVG}use")]
    texts = [[text.text for text in row.iter(f"{SVG}text")] for row in shown]
    assert texts == [["$", "run it"], ["green", "plain"], ["in runs <b>"], ["2 of 2"]]
    fills = {text.text: text.get("fill") for row in shown for text in row.iter(f"{SVG}text")}
    assert fills["green"] != fills["plain"] == fills["2 of 2"]


def test_a_command_that_fails_is_not_recorded(project: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.svg"
    done = recording(project, out, "print('broken'); raise SystemExit(3)")
    assert done.returncode == 1 and "ended with code 3" in done.stderr and "broken" in done.stderr
    assert not out.exists()
