"""The exported drafter gets the input that it was trained with, where the target scales its embedding."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import TargetConfig
from paceline.drafter.network import Drafter
from paceline.export.card import Origin
from paceline.export.exporter import TrainedDrafter, export_drafter, target_input
from paceline.target_model.load import load_target
from tiny_targets import save_tiny

SCALED = {
    "gemma3_text": ({"layer_types": ["full_attention"] * 4}, 32**0.5),  # inside its embedding module
    "granite": ({"embedding_multiplier": 12.0}, 12.0),  # outside of it
}


@pytest.mark.parametrize("family", [*SCALED, "qwen3"])
def test_a_scaled_embedding_reaches_the_folder(tmp_path, make_spec, family) -> None:
    more, scale = SCALED.get(family, ({}, 1.0))
    settings = TargetConfig(path=str(save_tiny(tmp_path / "target", family, **more)), dtype="float32")
    spec = make_spec(taps=(0, 2), num_target_layers=4, bos_token_id=None)
    target = load_target(settings, (0, 2))
    given = target_input(settings)
    assert given.scale == pytest.approx(scale)
    drafter = TrainedDrafter(spec, Drafter(spec).state_dict(), settings, Origin())
    found = export_drafter(drafter, tmp_path / "a", format="speculators", dtype="float32", golden="none")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert ("embed_tokens.weight" in tensors) == (scale != 1)
    if scale != 1:
        assert torch.equal(tensors["embed_tokens.weight"], target.embedding)
    assert "vLLM" in found["commands"]
    found = export_drafter(drafter, tmp_path / "b", dtype="float32", golden="none")
    config = json.loads((tmp_path / "b" / "config.json").read_text())["dflash_config"]
    assert config.get("input_embedding_scale", 1.0) == pytest.approx(scale)
    assert ("vLLM" in found["commands"]) == (scale == 1)
