"""A small real run, finished once; tests work on copies of its directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli import main

STEPS = 6


@pytest.fixture(scope="session")
def settings_of(demo_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Settings of a run of six cheap steps; sections are updated by what is given."""
    folder = tmp_path_factory.mktemp("shared")
    lines = (demo_assets / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "chats.jsonl").write_text("\n".join(sorted(lines, key=len)[:40]) + "\n", encoding="utf-8")

    def make(run_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
        base: dict[str, Any] = {
            "target": {"path": str(demo_assets / "target"), "dtype": "float32", "num_taps": 2},
            "data": {"train": [str(folder / "chats.jsonl")], "store": str(folder / "store"), "max_length": 256},
            "plan": {"token_budget": 512, "width_multiple": 32, "accumulate": 2, "max_samples": 4},
            "drafter": {"num_layers": 1, "block_size": 4, "num_anchors": 4, "dtype": "float32"},
            "optimizer": {"lr": 1e-3},
            "train": {"epochs": 20, "max_steps": STEPS},
            "flow": {"mode": "inline", "delivery": "ordered"},
            "checkpoint": {"every_steps": 2, "keep_last": 9},
            "observe": {"console": "quiet"},
        }
        names = {*base, *sections}
        return {"run_dir": str(run_dir)} | {name: {**base.get(name, {}), **sections.get(name, {})} for name in names}

    return make


@pytest.fixture
def make_run(settings_of: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Path]:
    """Writes a settings file and returns its path; the run's directory has the same name."""

    def make(name: str = "run", **sections: dict[str, Any]) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings_of(tmp_path / name, **sections)), encoding="utf-8")
        return path

    return make


@pytest.fixture(scope="session")
def finished(settings_of: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a finished run; not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "run.yaml").write_text(yaml.safe_dump(settings_of(folder / "run")), encoding="utf-8")
    assert main(["train", str(folder / "run.yaml")]) == 0
    return folder / "run"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))
