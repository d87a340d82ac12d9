"""The script that makes the oracle environment does its work once, and again when what it was made from has changed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(project: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("oracle_env", project / "scripts" / "oracle_env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _finished(script: ModuleType, folder: Path) -> None:
    script.interpreter(folder).parent.mkdir(parents=True)
    script.interpreter(folder).touch()
    (folder / script.STAMP).write_text(json.dumps(script.wanted()))


def test_a_finished_environment_is_left_alone(script, tmp_path, monkeypatch, capsys) -> None:
    _finished(script, tmp_path / "env")
    monkeypatch.setattr(script, "make", lambda folder: pytest.fail("made again"))
    monkeypatch.setattr("sys.argv", ["oracle_env.py", "--folder", str(tmp_path / "env")])
    assert script.main() == 0
    assert capsys.readouterr().out.strip() == str(script.interpreter(tmp_path / "env"))


def test_other_requirements_or_an_unfinished_build_make_it_anew(script, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "env"
    assert not script.is_ready(folder)
    _finished(script, folder)
    assert script.is_ready(folder)
    changed = tmp_path / "requirements.txt"
    changed.write_text("torch==0\n")
    monkeypatch.setattr(script, "REQUIREMENTS", changed)
    assert not script.is_ready(folder)
    monkeypatch.undo()
    (folder / script.STAMP).unlink()
    assert not script.is_ready(folder)


def test_the_place_can_be_chosen(script, tmp_path, monkeypatch, project) -> None:
    monkeypatch.setenv("PACELINE_ORACLE_VENV", str(tmp_path))
    assert script.default_folder() == tmp_path
    monkeypatch.delenv("PACELINE_ORACLE_VENV")
    assert script.default_folder() == project / ".venv-oracle"
