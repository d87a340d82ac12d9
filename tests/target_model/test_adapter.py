"""LoRA adapters: merged weights have the taps of the adapter at work, and adapters of other models are refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.facts import describe, describe_target
from paceline.target_model.load import load_target
from paceline.types import differing_parts
from tiny_targets import embedding_and_head, save_tiny

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
IDS = torch.tensor([[5, 9, 3, 44, 17, 8]])
LINEAR = ["q_proj", "v_proj", "down_proj"]


def save_adapter(base, folder, seed=0, **more):
    """A LoRA adapter with random matrices on both sides; returns its folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "task_type": "CAUSAL_LM", **more})
    tuned = get_peft_model(model, config)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tuned.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def adapter(qwen3, tmp_path_factory):
    return save_adapter(qwen3, tmp_path_factory.mktemp("adapter"))


def refusal(base, adapter) -> str:
    with pytest.raises(TargetError) as error:
        load_target(TargetConfig(path=str(base), dtype="float32", adapter=str(adapter)), [0])
    assert len(error.value.errors) == 1 and "\n" not in str(error.value)
    return str(error.value)


def test_merged_taps_are_those_of_the_adapter_at_work(qwen3, adapter):
    model = AutoModelForCausalLM.from_pretrained(str(qwen3), dtype=torch.float32)
    tuned = PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        states = tuned(input_ids=IDS, output_hidden_states=True).hidden_states
    expected = torch.cat([states[1][0], states[3][0]], dim=-1)
    target = load_target(TargetConfig(path=str(qwen3), dtype="float32", adapter=str(adapter)), [0, 2])
    assert torch.allclose(target.tap_rows(IDS, [6])[0], expected, atol=1e-5)
    assert not any("lora" in name for name, _ in target.model.named_modules())
    plain = load_target(TargetConfig(path=str(qwen3), dtype="float32"), [0, 2])
    assert not torch.allclose(plain.tap_rows(IDS, [6])[0], expected, atol=1e-1)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens", "q_proj"]}])
def test_embedding_and_head_are_the_tuned_models(qwen3, tmp_path, more):
    folder = save_adapter(qwen3, tmp_path / "adapter", **more)
    settings = TargetConfig(path=str(qwen3), dtype="float32", adapter=str(folder))
    target = load_target(settings, [0])
    embedding, head = embedding_and_head(qwen3, adapter=str(folder))
    assert torch.equal(embedding, target.embedding) and torch.equal(head, target.head)
    plain = embedding_and_head(qwen3)
    assert torch.equal(embedding, plain[0]) == ("target_modules" not in more)
    assert torch.equal(head, plain[1]) == ("modules_to_save" not in more)


def test_the_adapter_is_part_of_the_identity(qwen3, adapter, tmp_path):
    plain, tuned = (TargetConfig(path=str(qwen3), adapter=entry) for entry in (None, str(adapter)))
    assert describe_target(plain).fingerprint == describe(str(qwen3)).fingerprint
    assert differing_parts(describe_target(plain).identity, describe_target(tuned).identity) == ["adapter"]
    other = save_adapter(qwen3, tmp_path / "other", seed=1)
    again = TargetConfig(path=str(qwen3), adapter=str(other))
    assert differing_parts(describe_target(again).identity, describe_target(tuned).identity) == ["adapter"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"hidden_size": 64}, "size mismatch"), ({"num_hidden_layers": 3}, "which"), ({"num_hidden_layers": 6}, "which")],
)
def test_an_adapter_of_another_model_is_refused(qwen3, tmp_path, changes, says):
    base = save_tiny(tmp_path / "base", "qwen3", **changes)
    line = refusal(qwen3, save_adapter(base, tmp_path / "adapter"))
    assert "does not fit the target" in line and says in line and f"made for {base}" in line


def test_an_adapter_of_another_architecture_is_refused(qwen3, tmp_path):
    base = save_tiny(tmp_path / "base", "gpt2")
    folder = save_adapter(base, tmp_path / "adapter", target_modules=["c_attn"], fan_in_fan_out=True)
    assert "does not fit the target" in refusal(qwen3, folder)


def test_what_is_no_adapter_is_refused(qwen3, adapter, tmp_path):
    assert "no such folder" in refusal(qwen3, tmp_path / "nothing")
    assert "holds no adapter_config.json" in refusal(qwen3, qwen3)
    model = AutoModelForCausalLM.from_pretrained(str(qwen3))
    get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).save_pretrained(
        str(tmp_path / "prompt")
    )
    assert "cannot be merged" in refusal(qwen3, tmp_path / "prompt")
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in adapter.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    written = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**written, "peft_type": "NOVEL"}))
    assert "does not fit the target" in refusal(qwen3, broken)


def test_an_adapter_with_numbers_that_are_none(qwen3, adapter, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    stored = load_file(folder / "adapter_model.safetensors")
    stored[next(iter(stored))].fill_(float("nan"))
    save_file(stored, folder / "adapter_model.safetensors")
    assert "cannot be merged" in refusal(qwen3, folder)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
def test_one_end_of_a_tied_target(llama, tmp_path, end):
    """At work the adapter changes one end; in the weights there is but one, and taps or head would be others."""
    folder = save_adapter(llama, tmp_path / "adapter", target_modules=["q_proj", end])
    assert "whose weight is embedding and head at once" in refusal(llama, folder)
    whole = save_adapter(llama, tmp_path / "whole", modules_to_save=[end])
    model = AutoModelForCausalLM.from_pretrained(str(llama), dtype=torch.float32)
    tuned = PeftModel.from_pretrained(model, str(whole)).eval()
    with torch.no_grad():
        expected = tuned(input_ids=IDS, output_hidden_states=True)
    target = load_target(TargetConfig(path=str(llama), dtype="float32", adapter=str(whole)), [0, 3])
    assert torch.allclose(target.tap_rows(IDS, [6])[0][:, :32], expected.hidden_states[1][0], atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(target.model(input_ids=IDS).logits, expected.logits, atol=1e-4)
