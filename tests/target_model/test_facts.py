"""What is read from a target's folder, and how folders that are no target are refused."""

from __future__ import annotations

import json
import shutil

import pytest

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.facts import describe, identify_target
from paceline.types import differing_parts
from tiny_targets import save_tiny


@pytest.fixture
def copied(qwen3, tmp_path):
    """A copy of the Qwen3 folder that a test may spoil."""
    return shutil.copytree(qwen3, tmp_path / "copy")


def edit(folder, **changes):
    """Changes config.json; None removes a key."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({key: value for key, value in config.items() if changes.get(key, 0) is not None}))


def refusal(folder) -> str:
    with pytest.raises(TargetError) as error:
        describe(str(folder))
    assert len(error.value.errors) == 1 and "\n" not in str(error.value)
    return str(error.value)


def test_facts_of_a_plain_target(qwen3, llama):
    facts = describe(str(qwen3))
    assert (facts.architecture, facts.model_type) == ("Qwen3ForCausalLM", "qwen3")
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size, facts.intermediate_size) == (4, 32, 97, 48)
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.head_dim) == (4, 2, 8)
    assert (facts.rms_norm_eps, facts.rope_theta, facts.max_position_embeddings) == (1e-6, 10000.0, 128)
    assert (facts.bos_token_id, facts.eos_token_ids, facts.pad_token_id) == (1, (2,), 0)
    assert not facts.tied_head and describe(str(llama)).tied_head


def test_stop_tokens_of_generation_go_first(copied):
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert describe(str(copied)).eos_token_ids == (5, 2)


def test_missing_folder_and_config(tmp_path):
    assert "no such folder" in refusal(tmp_path / "nothing")
    assert "holds no config.json" in refusal(tmp_path)


def test_broken_config(copied):
    (copied / "config.json").write_text('{"model_type": "qwen3", ')
    assert "not readable as JSON" in refusal(copied)
    (copied / "config.json").write_text("[1]")
    assert "instead of an object" in refusal(copied)


def test_other_models_are_no_targets(copied, tmp_path):
    edit(copied, architectures=["Qwen3ForSequenceClassification"])
    assert "predicts no next token" in refusal(copied)
    edit(copied, model_type="t5", architectures=["T5ForConditionalGeneration"], layer_types=None)
    assert "'t5'" in refusal(copied)
    edit(copied, model_type="vit", architectures=["ViTModel"])
    assert "not a causal language model" in refusal(copied)
    edit(copied, model_type="no-such-type")
    assert "no-such-type" in refusal(copied)


def test_foreign_code_is_refused_unless_trusted(copied):
    edit(copied, model_type="strange", auto_map={"AutoModelForCausalLM": "code.Model"})
    assert "trust_remote_code" in refusal(copied)


def test_truncated_weights_are_refused(copied):
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "unreadable as safetensors" in refusal(copied)


def test_fingerprint_follows_weights_and_configuration_alone(qwen3, copied, tmp_path):
    known = describe(str(qwen3)).fingerprint
    assert describe(str(copied)).fingerprint == known
    edit(copied, transformers_version="0.0.0")
    assert describe(str(copied)).fingerprint == known
    other = save_tiny(tmp_path / "other", "qwen3", seed=1)
    assert describe(str(other)).fingerprint != known
    edit(copied, rms_norm_eps=1e-5)
    assert describe(str(copied)).fingerprint != known


def test_identity_names_the_part_that_changed(qwen3, copied, tmp_path):
    known = describe(str(qwen3)).identity
    assert set(known) == {"configuration", "weights"}
    other = save_tiny(tmp_path / "other", "qwen3", seed=1)
    assert differing_parts(known, describe(str(other)).identity) == ["weights"]
    (copied / "tokenizer.json").write_text("{}")
    edit(copied, rms_norm_eps=1e-5, quantization_config={"quant_method": "fp8"})
    assert differing_parts(known, identify_target(TargetConfig(path=str(copied)))) == [
        "configuration",
        "quantization",
        "tokenizer",
    ]


def test_preparing_needs_no_weights_to_name_its_target(copied):
    known = identify_target(TargetConfig(path=str(copied)))
    (copied / "model.safetensors").unlink()
    assert identify_target(TargetConfig(path=str(copied))) == {"configuration": known["configuration"]}
