"""The speculators folder: its configuration word for word, both ways bit for bit, and bad ones refused in one line."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ExportError
from paceline.export.formats import folder_format, read_drafter
from paceline.export.speculators import read_speculators, speculators_config, write_speculators
from paceline.export.verify import verify
from paceline.export.weights import content_hash
from paceline.export.zlab import write_zlab

KINDS = ["full", "sliding causal", "sliding bidirectional", "sliding bidirectional and full"]


def test_configuration_word_for_word(make_spec, make_facts) -> None:
    spec = make_spec("sliding bidirectional and full", sample_from_anchor=True)
    config = speculators_config(spec, make_facts(spec), "bfloat16")
    layer = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 6,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "draft_vocab_size": 97,
        "block_size": 6,
        "target_hidden_size": 32,
        "aux_hidden_state_layer_ids": [2, 5],
        "mask_token_id": 95,
        "sliding_window_non_causal": True,
        "sample_from_anchor": True,
        "num_target_layers": 6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    assert layer["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert (layer["sliding_window"], layer["use_sliding_window"], layer["model_type"]) == (8, True, "qwen3")
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 1_000_000.0}


def test_drafts_a_block_follow_the_label_convention(make_spec, make_facts) -> None:
    for shifted, drafts in ((False, 5), (True, 6)):
        spec = make_spec(sample_from_anchor=shifted)
        section = speculators_config(spec, make_facts(spec), "float32")["speculators_config"]
        assert section["proposal_methods"][0]["speculative_tokens"] == drafts


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_bit_equal(tmp_path, make_spec, make_state, make_facts, kind, dtype, shifted) -> None:
    spec = make_spec(kind, sample_from_anchor=shifted)
    state = make_state(spec)
    write_speculators(tmp_path / "drafter", spec, state, make_facts(spec), dtype)
    assert folder_format(tmp_path / "drafter") == "speculators"
    read_spec, read_state = read_drafter(tmp_path / "drafter")
    assert read_spec == spec
    for name, tensor in state.items():
        assert torch.equal(read_state[name], tensor.to(getattr(torch, dtype))), name


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_between_the_formats(tmp_path, make_spec, make_state, make_facts, kind) -> None:
    spec = make_spec(kind)
    facts = make_facts(spec)
    write_zlab(tmp_path / "first", spec, make_state(spec), facts)
    spec_1, state_1 = read_drafter(tmp_path / "first")
    write_speculators(tmp_path / "second", spec_1, state_1, facts)
    spec_2, state_2 = read_drafter(tmp_path / "second")
    write_zlab(tmp_path / "third", spec_2, state_2, facts)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "third" / name).read_bytes()
    assert (tmp_path / "second" / "model.safetensors").read_bytes() == (
        tmp_path / "first" / "model.safetensors"
    ).read_bytes()


def test_published_folders_with_the_targets_own_tensors_are_read(tmp_path, make_spec, make_state, make_facts) -> None:
    spec = make_spec()
    write_speculators(tmp_path / "drafter", spec, make_state(spec), make_facts(spec))
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    ours = content_hash(tensors)
    tensors |= {"embed_tokens.weight": torch.zeros(97, 32), "lm_head.weight": torch.zeros(97, 32)}
    save_file(tensors, tmp_path / "drafter" / "model.safetensors")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    del config["num_target_layers"], config["sample_from_anchor"], config["sliding_window_non_causal"]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    read_spec, state = read_speculators(tmp_path / "drafter")
    assert content_hash(state) == ours
    assert read_spec == make_spec(num_target_layers=5)


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("full", True),
        ("sliding bidirectional", True),
        ("sliding bidirectional and full", True),
        ("sliding causal", False),
    ],
)
def test_vllm_reads_the_causality_that_was_trained(make_spec, make_facts, kind, flag) -> None:
    """vLLM takes the opposite of the key as the causality of every layer, full ones included."""
    spec = make_spec(kind)
    assert speculators_config(spec, make_facts(spec), "float32")["sliding_window_non_causal"] is flag
    assert set(spec.causal) == {not flag}


def test_what_vllm_would_read_otherwise_is_refused(make_spec, make_facts) -> None:
    mixed = make_spec("sliding causal", causal=(True, False, True))
    for spec in (make_spec("full causal"), make_spec("sliding causal and full"), mixed):
        with pytest.raises(ExportError, match=r"format speculators: .* cannot be said; .* export with --format zlab"):
            speculators_config(spec, make_facts(spec), "float32")


def test_published_mixtures_are_read_as_they_were_trained(tmp_path, make_spec, make_state, make_facts) -> None:
    spec = make_spec("sliding bidirectional and full")
    write_speculators(tmp_path / "drafter", spec, make_state(spec), make_facts(spec))
    path = tmp_path / "drafter" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window_non_causal": False}))
    assert read_drafter(tmp_path / "drafter")[0] == make_spec("sliding causal and full")


def test_folder_carries_an_embedding_that_the_target_changes(tmp_path, make_spec, make_state, make_facts) -> None:
    spec = make_spec()
    state, table = make_state(spec), torch.randn(97, 32)
    write_speculators(tmp_path / "drafter", spec, state, make_facts(spec), embedding=table)
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], table.bfloat16())
    verify(tmp_path / "drafter", spec, state, make_facts(spec), None, table)
    with pytest.raises(ExportError, match=r"embed_tokens\.weight is not needed"):
        verify(tmp_path / "drafter", spec, state, make_facts(spec))
    with pytest.raises(ExportError, match=r"embed_tokens\.weight differs"):
        verify(tmp_path / "drafter", spec, state, make_facts(spec), None, 2 * table)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda c: c.update(speculators_model_type="eagle3"), r"speculators_model_type is 'eagle3'; a DFlash drafter"),
        (lambda c: c.pop("speculators_config"), r"speculators_config is absent; readers would build another model"),
        (lambda c: c.pop("transformer_layer_config"), r"transformer_layer_config is absent"),
        (lambda c: c.update(draft_vocab_size=64), r"draft_vocab_size 64 differs from vocab_size 97"),
        (lambda c: c.update(target_hidden_size=64), r"target_hidden_size is given as 64 and as 32"),
        (lambda c: c.pop("aux_hidden_state_layer_ids"), r"aux_hidden_state_layer_ids is absent; .* never guessed"),
        (lambda c: c.update(aux_hidden_state_layer_ids=[0, 2]), r"taps \[-1\]: outside the target's 6 layers"),
        (lambda c: c.update(mask_token_id=None), r"mask_token_id is None; a whole number from 0 on"),
        (lambda c: c.update(block_size=1), r"block_size is 1; a whole number from 2 on"),
        (lambda c: c.update(block_size=5), r"proposes 5 tokens, but a block of 5 drafts 4"),
        (lambda c: c["speculators_config"].update(algorithm="mtp"), r"algorithm is 'mtp'"),
        (
            lambda c: c["transformer_layer_config"]["layer_types"].__setitem__(1, "chunked_attention"),
            r"transformer_layer_config: unknown layer type chunked_attention",
        ),
    ],
)
def test_bad_configurations_are_refused_in_one_line(tmp_path, make_spec, make_state, make_facts, change, line) -> None:
    spec = make_spec("sliding bidirectional and full")
    write_speculators(tmp_path / "drafter", spec, make_state(spec), make_facts(spec))
    path = tmp_path / "drafter" / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(ExportError, match=line) as caught:
        read_speculators(tmp_path / "drafter")
    assert len(caught.value.errors) == 1
