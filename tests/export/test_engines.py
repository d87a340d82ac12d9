"""Commands are printed for engines that serve a drafter as it was trained; for the others it says why not."""

from __future__ import annotations

import json
import shlex

import pytest

from paceline.errors import ExportError
from paceline.export.engines import (
    ServedTarget,
    check_servable,
    obstacles,
    serving_commands,
    serving_notes,
    training_notes,
)

QWEN3 = ServedTarget("owner/target", "qwen3")


def test_command_lines_survive_a_shell(make_spec) -> None:
    target = ServedTarget("/models/my target", "llama")
    commands = serving_commands(make_spec(), "zlab", "drafters/first one", target)
    vllm = shlex.split(commands["vLLM"])
    assert [word for word in vllm if word != "\n"][:3] == ["vllm", "serve", "/models/my target"]
    assert json.loads(vllm[-1]) == {"method": "dflash", "model": "drafters/first one", "num_speculative_tokens": 5}
    sglang = shlex.split(commands["SGLang"])
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "DFLASH"
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == "drafters/first one"
    words = ["dflash", "generate", "transformers", "--model", "/models/my target", "--draft", "drafters/first one"]
    assert shlex.split(commands["z-lab dflash"])[:7] == words
    assert list(serving_commands(make_spec(), "speculators", "a", target)) == ["vLLM"]


def test_classes_of_transformers_where_vllm_hands_over_no_layers(make_spec) -> None:
    for kind, wanted in (("gemma3_text", True), ("mixtral", True), ("llama", False), ("granite", False)):
        target = ServedTarget("owner/target", kind)
        words = shlex.split(serving_commands(make_spec(), "speculators", "a", target)["vLLM"])
        assert ("--model-impl" in words) == wanted, kind
        notes = serving_notes(make_spec(), "speculators", target)
        assert any("transformers' class" in note for note in notes) == wanted, kind


@pytest.mark.parametrize(
    ("kind", "format", "left"),
    [
        ("full", "zlab", ["SGLang", "vLLM", "z-lab dflash"]),
        ("full", "speculators", ["vLLM"]),
        ("sliding causal and full", "zlab", ["SGLang", "vLLM", "z-lab dflash"]),
        ("sliding causal", "zlab", ["SGLang", "vLLM", "z-lab dflash"]),
        ("sliding bidirectional", "zlab", ["vLLM", "z-lab dflash"]),
        ("sliding bidirectional and full", "zlab", ["vLLM", "z-lab dflash"]),
        ("full causal", "zlab", ["vLLM", "z-lab dflash"]),
    ],
)
def test_which_engines_serve_which_layers(make_spec, kind, format, left) -> None:
    assert list(serving_commands(make_spec(kind), format, "a", QWEN3)) == left


@pytest.mark.parametrize(
    "target",
    [
        ServedTarget("owner/target", "gemma3_text"),
        ServedTarget("model.gguf", "llama"),
        ServedTarget("owner/target", "qwen3", adapter="adapters/mine"),
        ServedTarget("owner/target", "qwen3", quantization="4bit"),
        ServedTarget("owner/target", "qwen3", trust_remote_code=True),
    ],
)
def test_zlab_generate_is_for_plain_qwen3_and_llama(make_spec, target) -> None:
    assert "it loads plain Qwen3 and Llama targets only" in obstacles(make_spec(), "zlab", target)["z-lab dflash"]


def test_the_last_layer_is_served_by_vllm_alone(make_spec) -> None:
    spec = make_spec(taps=(1, 5))
    assert "after the final norm" in obstacles(spec, "zlab", QWEN3)["z-lab dflash"]
    assert any("vLLM serves that" in note for note in serving_notes(spec, "zlab", QWEN3))
    assert any("target.taps: 5" in note for note in training_notes(spec))


def test_drafting_from_the_anchor_is_served_by_none(make_spec) -> None:
    spec = make_spec(sample_from_anchor=True)
    assert serving_commands(spec, "speculators", "a", QWEN3) == {}
    assert "no released engine" in serving_notes(spec, "speculators", QWEN3)[0]
    assert "sample_from_anchor" in training_notes(spec)[0]
    assert training_notes(make_spec()) == []


@pytest.mark.parametrize("scale", [5.5, None])
def test_a_scaled_embedding_needs_the_folder_that_carries_it(make_spec, scale) -> None:
    target = ServedTarget("owner/target", "gemma3_text", embedding_scale=scale)
    assert "--format speculators" in obstacles(make_spec(), "zlab", target)["vLLM"]
    assert list(serving_commands(make_spec(), "zlab", "a", target)) == []
    assert list(serving_commands(make_spec(), "speculators", "a", target)) == ["vLLM"]


def test_changed_weights_are_named(make_spec) -> None:
    merged = ServedTarget("owner/target", "qwen3", adapter="adapters/mine")
    assert "vllm serve MERGED_TARGET" in serving_commands(make_spec(), "zlab", "a", merged)["vLLM"]
    assert "owner/target with the adapter mine merged into it" in serving_notes(make_spec(), "zlab", merged)[1]
    small = ServedTarget("owner/target", "qwen3", quantization="4bit")
    assert "--quantization bitsandbytes" in serving_commands(make_spec(), "zlab", "a", small)["vLLM"]
    assert "quantized to 4bit" in serving_notes(make_spec(), "zlab", small)[1]


def test_what_no_engine_computes_is_refused(make_spec) -> None:
    check_servable(make_spec("sliding bidirectional", sliding_window=6))
    check_servable(make_spec("sliding causal", sliding_window=2))
    with pytest.raises(ExportError, match=r"sliding_window 5: smaller than the block of 6"):
        check_servable(make_spec("sliding bidirectional", sliding_window=5))
    with pytest.raises(ExportError, match=r"taps \[4, 1\]: must ascend"):
        check_servable(make_spec(taps=(4, 1)))


def test_the_hub_name_is_found(tmp_path) -> None:
    assert ServedTarget("owner/target").hub_name == "owner/target"
    cached = tmp_path / "models--owner--some-target" / "snapshots" / "0a1b"
    assert ServedTarget(str(cached)).hub_name == "owner/some-target"
    assert (ServedTarget(str(tmp_path / "mine")).hub_name, ServedTarget(str(tmp_path / "mine")).name) == (None, "mine")
