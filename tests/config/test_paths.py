"""Paths in a settings file are relative to the file; the run's own copy holds absolute ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import absolute_paths, load_settings, setting_rows
from paceline.config.paths import PATHS
from paceline.errors import ConfigError

TEXT = """run_dir: runs/first
target:
  path: ./model
data:
  train: [chats.jsonl#tag=code&weight=0.5, /data/more.jsonl, "hub:owner/set#split=test", s3://bucket/a.jsonl]
  store: ../stores/one
drafter:
  init: drafts/old
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file in a folder beside the working directory."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "there" / "run.yaml").write_text(TEXT)
    return Path("../there/run.yaml")


def test_paths_in_a_file_are_relative_to_it(file: Path) -> None:
    settings = load_settings(file)
    assert settings.run_dir == "../there/runs/first" and settings.target.path == "../there/model"
    assert settings.drafter.init == "../there/drafts/old" and settings.data.store == "../there/../stores/one"
    assert settings.data.train == [
        "../there/chats.jsonl#tag=code&weight=0.5",
        "/data/more.jsonl",
        "hub:owner/set#split=test",
        "s3://bucket/a.jsonl",
    ]


def test_paths_of_flags_are_relative_to_the_working_directory(file: Path) -> None:
    settings = load_settings(file, {"run_dir": "runs/second", "data.train": "[chats.jsonl]"})
    assert settings.run_dir == "runs/second" and settings.data.train == ["chats.jsonl"]
    assert settings.target.path == "../there/model"


def test_absolute_paths_mean_the_same_places(file: Path, tmp_path: Path) -> None:
    settings = absolute_paths(load_settings(file, {"run_dir": "runs/second"}))
    assert settings.run_dir == str(tmp_path / "here" / "runs" / "second")
    assert Path(settings.target.path).resolve() == tmp_path / "there" / "model"
    assert settings.data.train[0].endswith("there/chats.jsonl#tag=code&weight=0.5")
    assert settings.data.train[1:] == ["/data/more.jsonl", "hub:owner/set#split=test", "s3://bucket/a.jsonl"]
    assert absolute_paths(settings) == settings


def test_a_hub_name_is_a_folder_only_where_there_is_one(file: Path, tmp_path: Path) -> None:
    file.write_text("run_dir: r\ntarget:\n  path: owner/model\n")
    assert load_settings(file).target.path == "owner/model"
    assert absolute_paths(load_settings(file)).target.path == "owner/model"
    (tmp_path / "there" / "owner" / "model").mkdir(parents=True)
    assert load_settings(file).target.path == "../there/owner/model"


def test_a_path_that_is_only_in_the_working_directory_is_refused(file: Path, tmp_path: Path) -> None:
    """Every such path at once, with its line, the place where it was looked for, and what to write."""
    (tmp_path / "here" / "chats.jsonl").write_text("{}\n")
    (tmp_path / "here" / "model").mkdir()
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    model, chats = caught.value.errors
    assert model.startswith("../there/run.yaml:3: target.path: ./model: not found at ")
    assert chats.startswith("../there/run.yaml:5: data.train: chats.jsonl: not found at ")
    assert chats.endswith("relative to the file: write ../here/chats.jsonl")


def test_a_misspelt_settings_file_is_answered_with_the_near_one(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"looked at .*/there/runn.yaml\); did you mean ../there/run.yaml\?"):
        load_settings(file.with_name("runn.yaml"))


def test_every_setting_that_names_a_place_is_placed() -> None:
    words = ("Folder of", "Drafter folder, ", "Directory of", "Files of", "JSONL, Parquet")
    assert {name for name, _, _, text in setting_rows() if text.startswith(words)} == set(PATHS)
