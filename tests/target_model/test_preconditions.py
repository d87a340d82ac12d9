"""Kernels for linear attention: one line where they are missing on a GPU, and where they are chosen by timing."""

from __future__ import annotations

import importlib.util

import pytest

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.preconditions import LINEAR_KERNELS, check_repeatable, slow_layers
from tiny_architectures import build, tiny_config


@pytest.fixture
def target(tmp_path):
    def make(kind):
        build(tiny_config(kind)).save_pretrained(str(tmp_path / kind))
        return TargetConfig(path=str(tmp_path / kind))

    return make


@pytest.fixture
def installed(monkeypatch):
    def only(*modules):
        honest = importlib.util.find_spec
        known = set(LINEAR_KERNELS.values())
        found = lambda name: (True if name in modules else None) if name in known else honest(name)  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", found)

    return only


def test_missing_kernels_are_named_with_their_cost(target, installed):
    hybrid, plain = target("qwen3_5_text"), target("qwen3")
    installed()
    line = slow_layers(hybrid, "cuda:3", 49_152)
    assert line is not None and "\n" not in line
    assert (
        "3 of its 4 layers are linear attention, and packages are missing for it" in line
        and "(flash-linear-attention, causal-conv1d): plain PyTorch" in line
    )
    # 4 heads of 16 + 16 + 64 numbers, three times, 4 bytes each.
    assert f"about {4 * 3 * 49_152 * 4 * 96 / 2**30:.1f} GiB" in line and "pip install 'paceline[fla]'" in line
    assert slow_layers(hybrid, "cpu", 49_152) is None
    assert slow_layers(plain, "cuda:3", 49_152) is None
    installed("fla")
    assert "for it (causal-conv1d):" in (slow_layers(hybrid, "cuda", 1) or "")
    installed("fla", "causal_conv1d")
    assert slow_layers(hybrid, "cuda", 1) is None


def test_kernels_chosen_by_timing_are_not_deterministic(target, installed):
    hybrid, plain = target("qwen3_5_text"), target("qwen3")
    installed("fla")
    with pytest.raises(TargetError, match=r"^train.deterministic: flash-linear-attention .* to false$"):
        check_repeatable(hybrid, "cuda:0")
    check_repeatable(hybrid, "cpu")
    check_repeatable(plain, "cuda:0")
    installed()
    check_repeatable(hybrid, "cuda:0")
