"""A run that is ended anywhere while it finishes loses nothing: the next one makes the same store."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from paceline import atomic_files
from paceline.config import DataConfig
from paceline.data import finalize, holdout, store
from paceline.data.prepare import prepare
from paceline.data.report import PrepareReport
from paceline.drafter.anchors import count_eligible

LOOKED_AT = {module.__file__ for module in (finalize, holdout, store, atomic_files)}
Place = tuple[str, int]
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": f"The answer is {n % 25}."},
        ],
        "document": f"book {n % 9}",
    }
    for n in range(40)
]


def traced(work: Callable[[], Any], at: Callable[[Place], None]) -> None:
    """Do work; `at` hears of every line of finishing that is about to run."""

    def lines(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            at((frame.f_code.co_filename, frame.f_lineno))
        return lines

    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: lines if frame.f_code.co_filename in LOOKED_AT else None)
    try:
        work()
    finally:
        sys.settrace(before)


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "manifest.json"}


# Ended between opening a file and the first line that uses it, a file is closed by the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("replaces", [False, True])
def test_finishing_can_be_ended_at_every_line(
    replaces: bool, tmp_path: Path, chatml: str, write_rows: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.readers._SMALLEST_SHARD", 2000)
    rows, other = write_rows(ROWS), write_rows(ROWS[:5], "other.jsonl")
    monkeypatch.chdir(tmp_path)

    def run(folder: str, file: str = rows) -> PrepareReport:
        config = DataConfig(heldout_share=0.3 if file == rows else 0.0)
        made = Path(folder) / "store"
        return prepare([file], made, chatml, config, count_eligible=count_eligible, replace=replaces)

    if replaces:
        run("begun", other)
    monkeypatch.setattr("paceline.data.prepare.finalize", lambda *_, **__: None)
    run("begun")
    monkeypatch.undo()
    monkeypatch.setattr("paceline.data.readers._SMALLEST_SHARD", 2000)
    monkeypatch.chdir(tmp_path)
    shutil.copytree("begun", "whole")
    seen: list[Place] = []
    traced(lambda: run("whole"), seen.append)
    whole, report = files_of(tmp_path / "whole" / "store"), run("whole")
    assert len(seen) > 100 and b"book" in whole["heldout.jsonl"] and len(whole) > 3

    last = {place: moment for moment, place in enumerate(seen)}
    for place, moment in last.items():
        shutil.copytree("begun", "ended")
        moments = iter(range(moment + 1))

        def end(_: Place, moments: Any = moments) -> None:
            if next(moments, None) is None:
                raise AssertionError("finishing took another way")
            if moments.__length_hint__() == 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            traced(lambda: run("ended"), end)
        again = run("ended")
        assert files_of(tmp_path / "ended" / "store") == whole, place
        assert replace(again, store="", reused=True) == replace(report, store=""), place
        assert sorted(path.name for path in Path("ended").iterdir()) == [".store.lock", "store"], place
        shutil.rmtree("ended")
