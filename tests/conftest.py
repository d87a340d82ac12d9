"""Fixtures and environment of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")


@pytest.fixture(scope="session")
def project() -> Path:
    """The project's root."""
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def demo_assets(project: Path) -> Path:
    """Folder of the embedded target and chats."""
    return project / "src" / "paceline" / "assets" / "demo"
