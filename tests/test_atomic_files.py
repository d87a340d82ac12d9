"""Files and folders that appear whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline import atomic_files
from paceline.atomic_files import open_itself, replacing, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(RuntimeError), replacing(path) as aside:
        aside.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]
    write_text(path, "new")
    assert path.read_text() == "new"


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for name in ("one", "two"):
        with replacing(path) as aside:
            (aside / "inner").mkdir(parents=True)
            (aside / "inner" / name).write_text(name)
    assert names(path / "inner") == ["two"] and names(tmp_path) == ["folder"]


def test_content_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is on the disk before its content survives a power cut as an empty file."""
    events: list[str] = []
    flushed, replaced = atomic_files.flush_entry, Path.replace
    monkeypatch.setattr(
        atomic_files, "flush_entry", lambda path: (events.append(f"flush {path.name}"), flushed(path))[1]
    )
    monkeypatch.setattr(Path, "replace", lambda self, to: (events.append("rename"), replaced(self, to))[1])
    write_text(tmp_path / "a", "text")
    assert events == ["flush a.writing", "rename", f"flush {tmp_path.name}"]


def test_a_link_that_somebody_put_there_is_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "log"
    victim.write_text("mine")
    path.symlink_to(victim)
    for flags in (os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_RDWR | os.O_APPEND):
        with pytest.raises(OSError, match=f"it is a link to {victim}, remove the link"):
            open_itself(path, flags)
    assert victim.read_text() == "mine"
    os.close(open_itself(victim, os.O_WRONLY))


def test_a_link_that_leads_nowhere_is_not_written_through(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        write_text(path, "new")
    assert names(tmp_path) == ["a.json"]
