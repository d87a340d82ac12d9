"""The commands of the tutorials, in their order, with small models; and their settings."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from paceline.cli import COMMANDS, command, main
from paceline.config import load_settings
from paceline.errors import ConfigError

FEW = ["--evaluate.num_prompts", "2", "--evaluate.max_new_tokens", "16"]
SHORT = {
    "demo": ["--train.max_steps", "4", "--flow.mode", "inline", *FEW],
    "check": ["--seconds", "2", "--rows", "32"],
    "train": ["--train.max_steps", "6", *FEW, "--yes"],
    "evaluate": FEW,
}
"""Flags that make a command of a page short."""


def commands(page: Path) -> list[list[str]]:
    """Commands of paceline that a page shows, without the comments behind them."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ *paceline (\S.*)$", text, flags=re.M)
    return [shlex.split(line, comments=True) for line in lines if line.split()[0] in COMMANDS]


def settings_of(page: Path) -> str:
    """The settings file that a page shows."""
    (text,) = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    return text


def run_all(asked: Sequence[list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    for words in asked:
        code = main([*words, *SHORT.get(words[0], [])])
        assert code == 0, (words, capfd.readouterr().err[-3000:])


@pytest.mark.slow
def test_the_first_drafter(project, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    asked = commands(project / "docs" / "first.md")
    assert [words[0] for words in asked] == [
        "demo", "status", "report", "chat", "fork", "train", "evaluate", "report"
    ]  # fmt: skip
    run_all(asked, capfd)
    assert Path("runs/demo/export/zlab/model.safetensors").is_file()
    assert Path("runs/demo/report.html").is_file() and Path("comparison.html").is_file()


@pytest.mark.slow
def test_my_own_data(project, demo_assets, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    page = project / "docs" / "own-data.md"
    shutil.copytree(demo_assets / "target", "models/mine")
    rows = [json.loads(line) for line in (demo_assets / "chats.jsonl").read_text(encoding="utf-8").splitlines()[:40]]
    Path("prompts.jsonl").write_text("".join(json.dumps({"messages": row["messages"][:1]}) + "\n" for row in rows))
    Path("run.yaml").write_text(settings_of(page))
    asked = commands(page)
    assert {words[0] for words in asked} == {
        "regenerate", "prepare", "plan", "check", "train", "evaluate", "report", "export"
    }  # fmt: skip
    run_all(asked, capfd)
    assert Path("runs/mine/export/zlab/model.safetensors").is_file()


def test_eight_gpus(project, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    page = (project / "docs" / "eight-gpus.md").read_text(encoding="utf-8")
    example = project / "examples" / "eight_gpus.yaml"
    shown = yaml.safe_load(example.read_text(encoding="utf-8"))
    quoted = re.findall(r"`(\w+)\.(\w+): (\d+)`", page)
    assert len(quoted) == 5
    assert all(shown[section][key] == int(value) for section, key, value in quoted)
    for text in re.findall(r"^    flow:\n(?:      .*\n)+", page, flags=re.M):
        changes = yaml.safe_load(text)["flow"]
        flags = {f"flow.{key}": str(value) for key, value in changes.items()}
        assert len(load_settings(example, flags).flow.drafter_devices) == len(changes["drafter_devices"])
    np.save("lengths.npy", np.random.default_rng(0).integers(65, 8192, 2000))
    (forecast,) = [words for words in commands(project / "docs" / "eight-gpus.md") if words[0] == "plan"]
    assert main(forecast) == 0, capfd.readouterr().err


def test_the_settings_of_the_night(project, tmp_path) -> None:
    page = (project / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^    run_dir:.*\n(?:    .*\n)+", page, flags=re.M)
    file = tmp_path / "run.yaml"
    file.write_text(textwrap.dedent(text))
    (served,) = re.findall(r'"num_speculative_tokens": (\d+)', page)
    assert load_settings(file).drafter.block_size == int(served) + 1


def test_every_shown_command_can_be_read(project) -> None:
    pages = [project / "README.md", *sorted((project / "docs").glob("*.md"))]
    shown = {tuple(words): page.name for page in pages for words in commands(page)}
    assert len(shown) > 50
    for (name, *words), page in shown.items():
        module = importlib.import_module(f"paceline.cli.{name}")
        end = words.index("--run") if name == "serve" and "--run" in words else len(words)
        try:
            command.parse(module.Arguments, words[:end], prog=f"paceline {name}", description="", settings=True)
        except (ConfigError, SystemExit) as error:
            raise AssertionError(f"{page}: paceline {name} {shlex.join(words)}") from error
