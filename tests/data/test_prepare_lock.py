"""Two processes that prepare the same store at once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import filelock
import pytest

from paceline.config import DataConfig
from paceline.data.prepare import prepare
from paceline.data.report import PrepareReport
from paceline.data.store import open_store
from paceline.drafter.anchors import count_eligible
from paceline.errors import DataError

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": f"The answer is {n}."},
        ]
    }
    for n in range(9)
]
PREPARE = """
import sys
from pathlib import Path
from paceline.config import DataConfig
from paceline.data.prepare import prepare
from paceline.drafter.anchors import count_eligible

def hear(stage, done, total):
    print(stage, flush=True)
    if stage == sys.argv[4]:
        sys.stdin.readline()

rows, store, tokenizer = sys.argv[1:4]
report = prepare([rows], Path(store), tokenizer, DataConfig(), count_eligible=count_eligible, progress=hear)
print("reused" if report.reused else "made", report.samples, flush=True)
"""


def start(rows: str, store: Path, tokenizer: str, stop_at: str) -> subprocess.Popen[str]:
    """A process that prepares, says its stages, and reads a line at the stage `stop_at`."""
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, rows, str(store), tokenizer, stop_at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_until(process: subprocess.Popen[str], wanted: str) -> list[str]:
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line.strip())
        if seen[-1] == wanted:
            break
    return seen


@pytest.mark.parametrize("killed", [False, True])
def test_the_second_process_waits_and_finds_the_store(
    killed: bool, tmp_path: Path, chatml: str, write_rows: Callable[..., str]
) -> None:
    rows, store = write_rows(CHATS), tmp_path / "store"
    with ExitStack() as ended:
        first = ended.enter_context(start(rows, store, chatml, "tokenizing"))
        ended.callback(first.kill)
        assert read_until(first, "tokenizing")[-1] == "tokenizing"
        second = ended.enter_context(start(rows, store, chatml, "waiting"))
        ended.callback(second.kill)
        assert read_until(second, "waiting")[-1] == "waiting"
        assert second.poll() is None and not store.exists()
        if killed:
            first.kill()
            first.wait()
        else:
            assert first.communicate("go\n")[0].strip().endswith("made 9")
        said = second.communicate("go\n")[0].strip()
    assert said.endswith("made 9" if killed else "reused 9") and second.returncode == 0
    assert len(open_store(store)) == 9
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".store")] == [".store.lock"]


def run(rows: str, store: Path, tokenizer: str) -> PrepareReport:
    return prepare([rows], store, tokenizer, DataConfig(), count_eligible=count_eligible)


def test_unfinished_folders_of_a_store_go_when_it_is_there(
    tmp_path: Path, chatml: str, write_rows: Callable[..., str]
) -> None:
    for name in (".store.0123456789ab.unfinished", ".store.a.0123456789ab.unfinished", "store.old"):
        (tmp_path / name).mkdir()
    run(write_rows(CHATS), tmp_path / "store", chatml)
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {"store", "store.old", ".store.a.0123456789ab.unfinished"}


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path: Path, chatml: str, write_rows: Callable[..., str]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match=r"\.store\.lock: cannot be made or locked \(File exists\)"):
        run(write_rows(CHATS), tmp_path / "file" / "store", chatml)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOLCK])
def test_an_existing_store_needs_no_lock(
    number: int, tmp_path: Path, chatml: str, write_rows: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(CHATS)
    run(rows, tmp_path / "store", chatml)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert run(rows, tmp_path / "store", chatml).reused
    if number == errno.ENOLCK:
        assert not run(rows, tmp_path / "other", chatml).reused
    else:
        with pytest.raises(DataError, match="cannot be made or locked"):
            run(rows, tmp_path / "other", chatml)
