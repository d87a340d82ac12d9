"""A small real run on the embedded target: real chats, real model, seconds of training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import DrafterConfig, load_settings
from paceline.data.tokenizer import load_tokenizer
from paceline.drafter.network import Drafter
from paceline.drafter.spec import derive_spec
from paceline.export.zlab import write_zlab
from paceline.run.build import build_run, resolve_models
from paceline.run.run import Run
from paceline.target_model.facts import describe
from paceline.target_model.taps import default_taps

MakeRun = Callable[..., Path]


def built(settings_file: Path) -> Run:
    """The run of a settings file, whose store is there."""
    settings = load_settings(settings_file)
    return build_run(settings, resolve_models(settings))


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested update."""
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result


@pytest.fixture(scope="session")
def few_chats(demo_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 of the shipped chats, spread over their lengths."""
    lines = (demo_assets / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = sorted(lines, key=lambda line: sum(len(m["content"]) for m in json.loads(line)["messages"]))
    chosen = chosen[:: max(1, len(chosen) // 80)][:80]
    path = tmp_path_factory.mktemp("chats") / "few.jsonl"
    path.write_text("\n".join(chosen) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all runs of the session; the first run prepares it."""
    return tmp_path_factory.mktemp("stores") / "store"


@pytest.fixture
def make_run(tmp_path: Path, demo_assets: Path, few_chats: Path, shared_store: Path) -> MakeRun:
    """Writes a settings file of a small run and returns its path."""

    def make(name: str = "run", **changes: Any) -> Path:
        base = {
            "run_dir": str(tmp_path / name),
            "target": {"path": str(demo_assets / "target"), "dtype": "float32", "num_taps": 3},
            "data": {"train": [str(few_chats)], "store": str(shared_store), "max_length": 512},
            "plan": {"token_budget": 1024, "width_multiple": 32, "accumulate": 2, "max_samples": 8},
            "drafter": {"num_layers": 2, "block_size": 4, "num_anchors": 8, "dtype": "float32"},
            "optimizer": {"lr": 1e-3},
            "train": {"epochs": 20, "max_steps": 30},
            "flow": {"mode": "inline", "delivery": "ordered"},
            "checkpoint": {"every_steps": 10, "keep_last": 3},
            "observe": {"console": "quiet"},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(merged(base, changes)), encoding="utf-8")
        return path

    return make


def export_random_drafter(out: Path, target: str) -> str:
    """A z-lab folder of a drafter of one layer and block 4 that has learned nothing."""
    facts = describe(target)
    mask = load_tokenizer(target, False).mask_token_id
    spec = derive_spec(DrafterConfig(num_layers=1, block_size=4), facts, default_taps(facts.num_layers, 2), mask)
    write_zlab(out, spec, Drafter(spec).state_dict(), facts, dtype="float32")
    return str(out)
