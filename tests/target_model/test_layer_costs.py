"""What a target's layers cost, against the weights of loaded models and sums written out."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model import layer_costs as module
from paceline.target_model.layer_costs import LayerCost, layer_costs
from paceline.target_model.load import load_model
from tiny_architectures import build, tiny_config


def saved(kind, tmp_path):
    build(tiny_config(kind)).save_pretrained(str(tmp_path / kind))
    return TargetConfig(path=str(tmp_path / kind), dtype="float32")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5_text", "llama", "gemma2", "gemma3", "gpt2", "mamba2", "qwen3_vl"])
def test_matrices_are_those_of_the_loaded_layers(kind, tmp_path):
    settings = saved(kind, tmp_path)
    _, structure, _ = load_model(settings)
    found = layer_costs(settings)
    expected = [sum(weight.numel() for weight in layer.parameters() if weight.ndim >= 2) for layer in structure.layers]
    assert [layer.matrices for layer in found] == expected


def test_recurrent_layers_attend_to_nothing_and_keep_a_state(tmp_path):
    settings = saved("qwen3_5_text", tmp_path)
    config = load_model(settings)[0].config.get_text_config(decoder=True)
    found = layer_costs(settings)
    for layer, kind in zip(found, config.layer_types, strict=True):
        recurrent = kind == "linear_attention"
        assert layer.across == (0 if recurrent else config.num_attention_heads * config.head_dim)
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        assert layer.state == (state if recurrent else 0)
    assert len({layer.across for layer in found}) == 2


def test_windows_are_those_of_their_layers(tmp_path):
    found = layer_costs(saved("gemma2", tmp_path))
    assert {layer.window for layer in found} == {8, None}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_token_goes_through_the_experts_it_is_sent_to(kind, tmp_path):
    """Two of four."""
    settings = saved(kind, tmp_path)
    _, structure, _ = load_model(settings)
    for cost, layer in zip(layer_costs(settings), structure.layers, strict=True):
        named = [(name, weight.numel()) for name, weight in layer.named_parameters() if weight.ndim >= 2]
        experts = sum(size for name, size in named if ".experts." in name)
        assert cost.matrices == sum(size for _, size in named) - experts / 2
    assert any(".experts." in name for name, _ in structure.layers[-1].named_parameters())


def test_experts_of_unknown_number_give_none(tmp_path, monkeypatch):
    settings = saved("qwen3_moe", tmp_path)
    monkeypatch.setattr(module, "ROUTED", ())
    assert layer_costs(settings) is None


def test_flops_of_a_layer_term_by_term():
    tokens = np.array([100, 10])
    pairs = lambda window: sum(min(t, window) for n in tokens for t in np.arange(0, n, 0.01)) / 100  # noqa: E731
    assert LayerCost(7.0, 16, None, 0).flops(tokens) == pytest.approx(2 * 7 * 110 + 4 * 16 * pairs(1000), rel=1e-3)
    assert LayerCost(7.0, 16, 30, 0).flops(tokens) == pytest.approx(2 * 7 * 110 + 4 * 16 * pairs(30), rel=1e-3)
    assert LayerCost(7.0, 0, None, 5).flops(tokens) == 2 * 7 * 110 + 6 * 5 * 110


def test_layers_that_are_not_found_are_one_line(tmp_path, monkeypatch):
    settings = saved("qwen3", tmp_path)

    def broken(config):
        raise RuntimeError("a class\nthat is missing")

    monkeypatch.setattr(module, "model_class", broken)
    with pytest.raises(TargetError, match=r"^target.path = .* its layers cannot be counted \(a class"):
        layer_costs(settings)
