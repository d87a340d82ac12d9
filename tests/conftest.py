"""Fixtures and environment of the whole suite."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tiny_targets import save_tiny

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
# A shell starts what runs in its background with Ctrl-C ignored; tests send it, and those that they start inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def project() -> Path:
    """The project's root."""
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def demo_assets(project: Path) -> Path:
    """Folder of the embedded target and chats."""
    return project / "src" / "paceline" / "assets" / "demo"


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    """Folder of a random Qwen3 with a head of its own."""
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """Folder of a random Llama with a tied head."""
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory):
    """A function: model type and its options → (target, random drafter)."""
    import torch

    from paceline.config import DrafterConfig, TargetConfig
    from paceline.drafter.network import Drafter
    from paceline.drafter.spec import derive_spec
    from paceline.target_model.load import load_target

    taps, folders = [0, 2], {}

    def make(model_type, *, dtype="float64", drafter=None, **more):
        key = (model_type, tuple(sorted(more.items())))
        if key not in folders:
            folders[key] = save_tiny(tmp_path_factory.mktemp(model_type), model_type, **more)
        target = load_target(TargetConfig(path=str(folders[key])), taps, dtype=dtype)
        config = DrafterConfig(num_layers=2, **{"mask_token_id": 3, "block_size": 6, **(drafter or {})})
        network = Drafter(derive_spec(config, target.facts, taps, None))
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(10)  # so that context matters to the drafts
        return target, network

    return make


@pytest.fixture(scope="session")
def prompts():
    """Eight random prompts of 1 to 24 tokens."""
    source = random.Random(5)
    return [[source.randrange(4, 97) for _ in range(length)] for length in (1, 2, 5, 9, 9, 13, 17, 24)]


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Rows (or raw lines) → path of a JSONL file."""

    def write(rows: Sequence[object], name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write
