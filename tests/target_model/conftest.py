"""Tiny targets, saved once a session."""

from __future__ import annotations

import pytest

from tiny_targets import save_tiny


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    """Folder of a random Qwen3 with a head of its own."""
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """Folder of a random Llama with a tied head."""
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)
