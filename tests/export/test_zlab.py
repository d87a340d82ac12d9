"""The z-lab folder: its configuration word for word, its tensors bit for bit, and bad ones refused in one line."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ExportError
from paceline.export.verify import verify
from paceline.export.weights import content_hash, expected_shapes
from paceline.export.zlab import read_zlab, spec_from_zlab, write_zlab, zlab_config

KINDS = ["full", "sliding causal and full", "sliding causal", "sliding bidirectional", "sliding bidirectional and full"]


def test_configuration_word_for_word(make_spec) -> None:
    assert zlab_config(make_spec("sliding causal and full"), "bfloat16") == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 6,
        "dflash_config": {"block_size": 6, "mask_token_id": 95, "target_layer_ids": [1, 4]},
        "num_target_layers": 6,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": 97,
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 8,
        "use_sliding_window": True,
        "max_window_layers": 3,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
    }


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("full", None),
        ("sliding causal and full", None),
        ("sliding causal", None),
        ("sliding bidirectional", False),
        ("sliding bidirectional and full", False),
        ("full causal", True),
    ],
)
def test_causality_is_written_where_the_default_is_wrong(make_spec, kind, flag) -> None:
    assert zlab_config(make_spec(kind), "float32").get("is_causal") == flag


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", [*KINDS, "full causal"])
def test_round_trip_is_bit_equal(tmp_path, make_spec, make_state, make_facts, kind, dtype) -> None:
    spec = make_spec(kind)
    state = make_state(spec)
    write_zlab(tmp_path / "drafter", spec, state, make_facts(spec), dtype)
    read_spec, read_state = read_zlab(tmp_path / "drafter")
    assert read_spec == spec
    assert list(read_state) and set(read_state) == set(state)
    for name, tensor in state.items():
        assert torch.equal(read_state[name], tensor.to(getattr(torch, dtype))), name
    write_zlab(tmp_path / "again", read_spec, read_state, make_facts(spec), dtype)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "drafter" / name).read_bytes()


def test_tensor_names_are_the_published_ones(tmp_path, make_spec, make_state) -> None:
    spec = make_spec()
    write_zlab(tmp_path / "drafter", spec, make_state(spec))
    names = set(load_file(tmp_path / "drafter" / "model.safetensors"))
    assert len(names) == 3 + 11 * 3
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.2.self_attn.q_norm.weight"} < names
    assert {name.split(".")[0] for name in names} == {"fc", "hidden_norm", "norm", "layers"}


def test_shapes_are_those_of_the_published_27b_drafter(make_spec) -> None:
    spec = make_spec(
        num_layers=5,
        layers=("sliding",) * 4 + ("full",),
        causal=(True,) * 4 + (False,),
        sliding_window=2048,
        hidden_size=5120,
        intermediate_size=17408,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        taps=(1, 16, 31, 46, 61),
        num_target_layers=64,
        vocab_size=248_320,
        mask_token_id=248_070,
    )
    shapes = expected_shapes(spec)
    assert len(shapes) == 58
    assert shapes["fc.weight"] == (5120, 25_600)
    assert shapes["layers.4.self_attn.k_proj.weight"] == (1024, 5120)
    total = 0
    for shape in shapes.values():
        size = 1
        for side in shape:
            size *= side
        total += size
    assert round(total / 1e9, 2) == 1.73


def test_large_drafters_are_sharded(tmp_path, make_spec, make_state) -> None:
    spec = make_spec()
    state = make_state(spec)
    write_zlab(tmp_path / "drafter", spec, state, dtype="float32", shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "drafter").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "drafter" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in state.values())
    assert set(index["weight_map"]) == set(state) and set(index["weight_map"].values()) == set(files)
    _, read_state = read_zlab(tmp_path / "drafter")
    assert content_hash(read_state) == content_hash(state)


def test_content_hash_tells_weights_of_one_name_apart(make_spec, make_state) -> None:
    spec = make_spec()
    first, second = make_state(spec), make_state(spec)
    assert content_hash(first) == content_hash(dict(reversed(first.items()))) == content_hash(second)
    second["norm.weight"][3] += 1e-6
    assert content_hash(first) != content_hash(second)


def test_a_folder_appears_whole_or_the_old_one_stays(tmp_path, make_spec, make_state) -> None:
    spec = make_spec()
    write_zlab(tmp_path / "drafter", spec, make_state(spec), dtype="float32")

    def fail(folder, stored) -> None:
        assert (folder / "model.safetensors").is_file()
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_zlab(tmp_path / "drafter", spec, make_state(spec, 8), dtype="float32", extras=fail)
    assert torch.equal(read_zlab(tmp_path / "drafter")[1]["fc.weight"], make_state(spec)["fc.weight"])
    write_zlab(tmp_path / "drafter", spec, make_state(spec, 8), dtype="float32")
    assert torch.equal(read_zlab(tmp_path / "drafter")[1]["fc.weight"], make_state(spec, 8)["fc.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_foreign_folders_are_never_replaced(tmp_path, make_spec, make_state) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("dear reader")
    with pytest.raises(ExportError, match="something else than a drafter"):
        write_zlab(tmp_path / "thesis", make_spec(), make_state(make_spec()))
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "dear reader"


def test_inexpressible_drafters_are_refused(tmp_path, make_spec, make_state, make_facts) -> None:
    mixed = make_spec("sliding causal and full", causal=(True, False, False))
    with pytest.raises(ExportError, match="cannot be said"):
        zlab_config(mixed, "bfloat16")
    with pytest.raises(ExportError, match=r"sample_from_anchor.*--format speculators"):
        zlab_config(make_spec(sample_from_anchor=True), "bfloat16")
    spec = make_spec()
    state = make_state(spec)
    with pytest.raises(ExportError, match="float16: a drafter folder is written in bfloat16 or float32"):
        write_zlab(tmp_path / "a", spec, state, dtype="float16")
    state["norm.weight"][1] = torch.nan
    with pytest.raises(ExportError, match=r"not finite in bfloat16: norm\.weight"):
        write_zlab(tmp_path / "a", spec, state)
    assert not list(tmp_path.iterdir())


def test_wrong_target_is_refused_with_every_difference(tmp_path, make_spec, make_state, make_facts) -> None:
    spec = make_spec()
    facts = make_facts(spec, hidden_size=64, vocab_size=98, num_layers=7)
    with pytest.raises(ExportError) as caught:
        write_zlab(tmp_path / "drafter", spec, make_state(spec), facts)
    assert [line.split(",")[0] for line in caught.value.errors] == [
        "drafter: hidden_size 32",
        "drafter: vocab_size 97",
        "drafter: num_target_layers 6",
    ]
    with pytest.raises(ExportError, match="mask_token_id 3 is the target's eos token"):
        write_zlab(tmp_path / "drafter", make_spec(mask_token_id=3), make_state(spec))


def test_scale_of_the_targets_embedding_is_written(tmp_path, make_spec, make_state) -> None:
    spec = make_spec()
    assert "input_embedding_scale" not in zlab_config(spec, "float32")["dflash_config"]
    state = make_state(spec)
    write_zlab(tmp_path / "drafter", spec, state, embedding_scale=5.5)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["dflash_config"]["input_embedding_scale"] == 5.5
    assert read_zlab(tmp_path / "drafter")[0] == spec
    verify(tmp_path / "drafter", spec, state, embedding_scale=5.5)
    with pytest.raises(ExportError, match=r"input_embedding_scale is 5\.5"):
        verify(tmp_path / "drafter", spec, state)
    with pytest.raises(ExportError, match="more than a multiple of its embedding"):
        zlab_config(spec, "float32", None)


@pytest.fixture
def written(tmp_path, make_spec, make_state):
    spec = make_spec("sliding causal and full")
    write_zlab(tmp_path / "drafter", spec, make_state(spec))
    return tmp_path / "drafter"


def _edit(folder, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda c: c.update(block_size=7), r"block_size is given as 7 and as 6; make them equal"),
        (lambda c: c["dflash_config"].pop("target_layer_ids"), r"target_layer_ids is neither .* never guessed"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 6]), r"taps \[6\]: outside the target's 6 layers"),
        (
            lambda c: c["dflash_config"].update(target_layer_ids="1,4"),
            r"target_layer_ids is '1,4'; a list of layer ids",
        ),
        (
            lambda c: c["dflash_config"].update(mask_token_id=97),
            r"mask_token_id = 97: outside the embedding of 97 rows",
        ),
        (lambda c: c["dflash_config"].pop("mask_token_id"), r"mask_token_id is neither"),
        (lambda c: c["dflash_config"].update(selector_rank=8), r"dflash_config has selector_rank"),
        (lambda c: c.update(input_embedding_scale=0), r"input_embedding_scale is 0; a number from 1e-06"),
        (lambda c: c.pop("num_target_layers"), r"num_target_layers is absent; a whole number"),
        (
            lambda c: c["layer_types"].__setitem__(0, "linear_attention"),
            r"unknown layer type linear_attention; allowed",
        ),
        (lambda c: c["layer_types"].pop(), r"layer_types must list one type for each of the 3 layers"),
        (lambda c: c.update(use_sliding_window=False), r"the window would be dropped"),
        (lambda c: c.update(sliding_window=None), r"sliding_window is None; a whole number from 1 on"),
        (lambda c: c.pop("layer_types"), r"use_sliding_window without layer_types"),
        (lambda c: c.update(rope_theta=10_000.0), r"rope_theta is given as 10000.0 and as 1000000.0"),
        (lambda c: c.update(rope_scaling={"rope_type": "yarn", "factor": 4}), r"rope_scaling asks for yarn"),
        (lambda c: c["rope_parameters"].update(partial_rotary_factor=0.25), r"a drafter rotates whole heads"),
        (lambda c: c.update(attention_bias=True), r"attention_bias is True"),
        (lambda c: c.update(final_logit_softcapping=30.0), r"final_logit_softcapping is 30.0"),
        (lambda c: c.update(hidden_act="gelu"), r"hidden_act is 'gelu'"),
        (lambda c: c.update(architectures=["DFlash2DraftModel"]), r"architectures is \['DFlash2DraftModel'\]"),
        (lambda c: c.update(hidden_size="32"), r"hidden_size is '32'; a whole number"),
        (lambda c: c.update(num_key_value_heads=3), r"num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ],
)
def test_bad_configurations_are_refused_in_one_line(written, change, line) -> None:
    _edit(written, change)
    with pytest.raises(ExportError, match=line) as caught:
        read_zlab(written)
    assert len(caught.value.errors) == 1
    assert str(caught.value).startswith(str(written / "config.json"))


def test_bad_tensors_are_refused_and_named(written) -> None:
    tensors = load_file(written / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()
    del tensors["layers.1.mlp.up_proj.weight"]
    tensors["lm_head.weight"] = torch.zeros(4)
    save_file(tensors, written / "model.safetensors")
    with pytest.raises(ExportError) as caught:
        read_zlab(written)
    missing, extra, misshaped = caught.value.errors
    assert missing.startswith(f"{written}: tensors missing: layers.1.mlp.up_proj.weight;")
    assert "lm_head.weight" in extra
    assert misshaped.endswith("fc.weight has shape [64, 32], the configuration asks for [32, 64]")


def test_broken_folders_are_refused_in_one_line(tmp_path, written) -> None:
    with pytest.raises(ExportError, match=r"no config\.json"):
        read_zlab(tmp_path)
    (written / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ExportError, match="cannot be read as safetensors"):
        read_zlab(written)
    (written / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        read_zlab(written)
    (written / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(ExportError, match=r"model-00001-of-00002\.safetensors: cannot be read"):
        read_zlab(written)
    (written / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ExportError, match="no index of safetensors shards"):
        read_zlab(written)
    (written / "config.json").write_text("[1]")
    with pytest.raises(ExportError, match="holds no JSON object"):
        read_zlab(written)


PUBLISHED = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "head_dim": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "use_cache": True,
}
QWEN3_8B_B16 = {
    **PUBLISHED,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151_669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "layer_types": ["full_attention"] * 5,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 5,
    "max_position_embeddings": 40_960,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
QWEN36_27B = {
    **PUBLISHED,
    "dflash_config": {"block_size": 16, "mask_token_id": 248_070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "num_target_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 248_320,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000},
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
    "max_position_embeddings": 262_144,
}
QWEN35_4B = {
    **PUBLISHED,
    "dflash_config": {"block_size": 16, "mask_token_id": 248_070, "target_layer_ids": [1, 8, 15, 22, 29]},
    "num_target_layers": 32,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 248_320,
    "rope_theta": 10_000_000,
    "max_position_embeddings": 262_144,
}
LLAMA_B10 = {
    **PUBLISHED,
    "block_size": 10,
    "dflash_config": {"mask_token_id": 128_002, "target_layer_ids": [1, 8, 15, 22, 29]},
    "num_target_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
}


def test_published_keys_are_read_from_either_place() -> None:
    """Older folders have the block size outside, some have everything outside, newer ones everything inside."""
    inner = {"block_size": 16, **QWEN3_8B_B16["dflash_config"]}
    rest = {key: value for key, value in QWEN3_8B_B16.items() if key not in ("block_size", "dflash_config")}
    expected = spec_from_zlab("older", QWEN3_8B_B16)
    assert spec_from_zlab("outside", {**rest, **inner}) == expected
    assert spec_from_zlab("inside", {**rest, "dflash_config": inner}) == expected
    assert spec_from_zlab("both", {**rest, **inner, "dflash_config": inner}) == expected


@pytest.mark.parametrize(
    ("config", "block", "kinds", "causal", "window", "theta"),
    [
        (QWEN3_8B_B16, 16, ("full",) * 5, (False,) * 5, None, 1e6),
        (QWEN36_27B, 16, ("sliding",) * 4 + ("full",), (True,) * 4 + (False,), 2048, 1e7),
        (QWEN35_4B, 16, ("full",) * 5, (False,) * 5, None, 1e7),
        (LLAMA_B10, 10, ("full",) * 5, (False,) * 5, None, 5e5),
    ],
    ids=["Qwen3-8B b16", "Qwen3.6-27B", "Qwen3.5-4B", "Llama-3.1-8B b10"],
)
def test_published_configurations_are_read(tmp_path, config, block, kinds, causal, window, theta) -> None:
    spec = spec_from_zlab("published", config)
    assert (spec.block_size, spec.layers, spec.causal, spec.sliding_window) == (block, kinds, causal, window)
    assert (spec.rope_theta, list(spec.taps)) == (theta, config["dflash_config"]["target_layer_ids"])
    assert spec.mask_token_id == config["dflash_config"]["mask_token_id"]
    small = {**config, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1}
    narrow = spec_from_zlab("narrow", small)
    assert narrow == dataclasses.replace(
        spec, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=1
    )
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in expected_shapes(narrow).items()
    }
    (tmp_path / "config.json").write_text(json.dumps(small))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read_spec, read_state = read_zlab(tmp_path)
    assert read_spec == narrow
    write_zlab(tmp_path / "ours", read_spec, read_state)
    again, state = read_zlab(tmp_path / "ours")
    assert again == narrow and content_hash(state) == content_hash(tensors)
