"""Templates that loop for ever or ask for all memory end in one line."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.data.render_limits import TooSlow, limited_memory, limited_time

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set ns = namespace(s='x' * 4096) %}{% for n in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
)
AT_ONCE = "{{ 'x' * 900000000000 }}"


def settings_with(template: str, demo_assets: Path, tmp_path: Path, workers: int) -> Path:
    target = tmp_path / "target"
    shutil.copytree(demo_assets / "target", target)
    (target / "chat_template.jinja").write_text(template)
    lines = (demo_assets / "chats.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "chats.jsonl").write_text("".join(lines[:4]))
    settings = {
        "run_dir": str(tmp_path / "run"),
        "target": {"path": str(target)},
        "data": {"train": [str(tmp_path / "chats.jsonl")], "workers": workers},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(
    ("template", "says"),
    [(ENDLESS, "has not ended after 0.3 s on a chat"), (DOUBLES, "asks for too much"), (AT_ONCE, "asks for too much")],
)
def test_a_template_without_end_is_one_line(
    template: str, says: str, demo_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    seconds = 0.3 if template == ENDLESS else 20.0
    monkeypatch.setattr("paceline.data.render_limits.SECONDS", seconds)
    monkeypatch.setattr("paceline.data.chat_template.SECONDS", seconds)
    monkeypatch.setattr("paceline.data.render_limits.ROOM", 2**28)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert main(["prepare", str(settings_with(template, demo_assets, tmp_path, 1))]) == 1
    said = capfd.readouterr().err.strip()
    assert len(said.splitlines()) == 1 and said.startswith("error: ")
    assert f"{tmp_path / 'target'}: its chat template {says}" in said and "correct it" in said
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_time_counts_for_one_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block has all of the time, whatever the blocks before it took, and nothing is left of it afterwards."""
    monkeypatch.setattr("paceline.data.render_limits.SECONDS", 0.2)
    handler = signal.getsignal(signal.SIGVTALRM)
    for _ in range(4):
        with limited_time():
            compute(0.1)
    with pytest.raises(TooSlow), limited_time():
        compute(40)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == handler
    compute(0.3)


def compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_the_memory_limit_ends_with_its_block() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited_memory():
        with pytest.raises(MemoryError):
            bytearray(2**44)
        assert len(bytearray(2**20)) == 2**20
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
