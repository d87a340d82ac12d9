"""Odd and damaged folders: one line each, and never other weights than those that transformers loads."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.facts import describe
from paceline.target_model.load import load_target
from tiny_targets import embedding_and_head, save_tiny, tiny_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    tiny_model("qwen3").save_pretrained(str(folder), max_shard_size="20KB")
    assert (folder / INDEX).is_file()
    return folder


def copy(folder, into):
    shutil.copytree(folder, into)
    return into


def refusal(folder, **more) -> str:
    with pytest.raises(TargetError) as error:
        load_target(TargetConfig(path=str(folder), dtype="float32", **more), [0])
    assert len(error.value.errors) == 1 and "\n" not in str(error.value)
    return str(error.value)


def configure(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def test_a_whole_file_counts_more_than_shards(shards, tmp_path):
    """transformers loads the whole file; the drafter's ends and the identity must be of the same one."""
    folder = copy(shards, tmp_path / "both")
    other = save_tiny(tmp_path / "other", "qwen3", seed=7)
    shutil.copy(other / "model.safetensors", folder)
    embedding, head = embedding_and_head(folder)
    target = load_target(TargetConfig(path=str(folder), dtype="float32"), [0])
    assert torch.equal(embedding, target.embedding)
    assert torch.equal(head, target.head)
    assert describe(str(folder)).identity["weights"] == describe(str(other)).identity["weights"]


def test_two_ends_in_the_files_of_a_tied_configuration(qwen3, tmp_path):
    """transformers keeps both; a drafter must not take the head for the embedding."""
    folder = configure(copy(qwen3, tmp_path / "untied"), tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    assert not torch.equal(stored["model.embed_tokens.weight"], stored["lm_head.weight"])
    embedding, head = embedding_and_head(folder)
    target = load_target(TargetConfig(path=str(folder), dtype="float32"), [0])
    assert torch.equal(embedding, target.embedding)
    assert torch.equal(head, target.head)
    assert torch.equal(embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(head, stored["lm_head.weight"])


@pytest.mark.parametrize(
    "index", ["{broken", "{}", "[]", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}']
)
def test_an_index_that_is_none(shards, tmp_path, index):
    folder = copy(shards, tmp_path / "t")
    (folder / INDEX).write_text(index)
    assert f"{folder / INDEX}: not the index of weight files" in refusal(folder)


def rewrite(file, change):
    """Gives a safetensors file another header."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.dumps(change(json.loads(content[8 : 8 + size]))).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + size :])


def set_entry(header, **values):
    name = next(name for name in header if name != "__metadata__")
    return {**header, name: {**header[name], **values}}


@pytest.mark.parametrize(
    "change",
    [lambda header: [1], lambda header: set_entry(header, dtype="Q7"), lambda header: set_entry(header, shape=[7])],
)
def test_a_header_that_is_damaged(qwen3, tmp_path, change):
    folder = copy(qwen3, tmp_path / "t")
    rewrite(folder / "model.safetensors", change)
    assert str(folder) in refusal(folder)


def test_bytes_behind_the_last_tensor(qwen3, tmp_path):
    folder = copy(qwen3, tmp_path / "t")
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "its weights cannot be loaded" in refusal(folder)


def test_a_pickle_that_would_run_code(qwen3, tmp_path):
    folder, mark = copy(qwen3, tmp_path / "t"), tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Runs(str(mark))}, folder / "pytorch_model.bin")
    assert "its weights cannot be loaded" in refusal(folder)
    assert not mark.exists()


class Runs:
    """Makes a file when it is unpickled without care."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (self.file, "w")


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_whose_configuration_does_not_say_so(qwen3, tmp_path, kind):
    folder = copy(qwen3, tmp_path / "t")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    stored[name], stored[f"{name}_scale_inv"] = (stored[name] * 20).to(kind), torch.tensor([[0.05]])
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"{name} is stored as" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "x"}, "'hidden_size': TypeError: Field 'hidden_size' expected int"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"pad_token_id": 5000}, "Padding_idx must be within num_embeddings"),
    ],
)
def test_a_configuration_with_nonsense(qwen3, tmp_path, changes, words):
    assert words in refusal(configure(copy(qwen3, tmp_path / "t"), **changes))


def test_stop_tokens_that_are_none(qwen3, tmp_path):
    folder = copy(qwen3, tmp_path / "t")
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert "eos_token_id holds 'x', which is not a token" in refusal(folder)


def test_a_folder_named_like_a_file(qwen3, tmp_path):
    assert "is a folder that is named like a GGUF file" in refusal(copy(qwen3, tmp_path / "t.gguf"))


@pytest.mark.parametrize("code", ["def f(:", "undefined", "raise RuntimeError('no')", "1 / 0", "nothing = 1"])
def test_code_of_its_own_that_breaks(qwen3, tmp_path, code, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = configure(
        copy(qwen3, tmp_path / "t"), model_type="own_kind", auto_map={"AutoConfig": "configuration_own.OwnConfig"}
    )
    (folder / "configuration_own.py").write_text(code + "\n")
    assert "set target.trust_remote_code to true" in refusal(folder)
    assert "config.json cannot be used" in refusal(folder, trust_remote_code=True)


def test_a_head_on_the_disk_when_weights_are_to_be_widened(qwen3):
    """Plain weights stay where they are."""
    settings = {"quantization": "none", "device_map": {"model": "cpu", "lm_head": "disk"}}
    target = load_target(TargetConfig(path=str(qwen3), dtype="float32", **settings), [0, 2])
    plain = load_target(TargetConfig(path=str(qwen3), dtype="float32"), [0, 2])
    ids = torch.tensor([[5, 9, 3, 44]])
    assert torch.equal(target.tap_rows(ids, [4])[0], plain.tap_rows(ids, [4])[0])


def test_weights_that_load_but_cannot_run(qwen3):
    """4-bit blocks are wider than these matrices."""
    assert "it loads, but cannot run on cpu" in refusal(qwen3, quantization="4bit")
