"""Embedding and head: what layer 0 sees, the model's own logits, handed over once or read without the other layers."""

from __future__ import annotations

import shutil

import pytest
import safetensors.torch
import torch

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.pipeline.process import Stage, WorkerProcess
from paceline.target_model.load import load_target
from paceline.target_model.shared_weights import on_host, shared_weights
from paceline.target_model.teacher import Teacher
from tiny_architectures import build, tiny_config
from tiny_targets import embedding_and_head, save_tiny

IDS = torch.tensor([[5, 9, 3, 44, 17]])
KINDS = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": True},
    "gemma2": {},
    "gemma3_text": {},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 3.0},
    "cohere": {},
}


@pytest.mark.parametrize("model_type", KINDS)
def test_embedding_is_what_layer_zero_sees(tmp_path, model_type):
    folder = save_tiny(tmp_path, model_type, **KINDS[model_type])
    embedding, head = embedding_and_head(folder)
    target = load_target(TargetConfig(path=str(folder), dtype="float32"), [0])
    seen, outputs = [], []
    layers = target.structure.layers
    layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0]), with_kwargs=True
    )
    target.structure.head.register_forward_hook(lambda _, args, output: outputs.append((args[0], output)))
    target.model(input_ids=IDS)
    assert torch.equal(embedding[IDS[0]], seen[0][0])
    assert torch.equal(target.embedding, embedding) and torch.equal(target.head, head)
    torch.testing.assert_close(outputs[0][0] @ head.T, outputs[0][1])


def test_an_embedding_of_its_own_kind_is_read_as_it_is_stored(tmp_path):
    """A weightless norm sits in this one's embedding module, whose weight initialising would overwrite."""
    build(tiny_config("muse_glimmer")).save_pretrained(str(tmp_path))
    embedding, head = embedding_and_head(tmp_path)
    target = load_target(TargetConfig(path=str(tmp_path), dtype="float32"), [0])
    assert torch.equal(embedding, target.embedding) and torch.equal(head, target.head)


def test_tied_head_is_the_embedding(llama):
    embedding, head = embedding_and_head(llama)
    assert torch.equal(embedding, head)
    target = load_target(TargetConfig(path=str(llama), dtype="float32"), [0])
    assert torch.equal(target.head, embedding)


def spoiled(folder, tmp_path, change):
    """A copy whose weights `change` has edited."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    file = copy / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return str(copy)


def test_only_the_first_layer_is_read_for_them(qwen3, tmp_path):
    """Deeper layers may be missing from the folder: nobody asks for them."""
    expected = embedding_and_head(qwen3)
    path = spoiled(qwen3, tmp_path, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    assert all(map(torch.equal, embedding_and_head(path), expected))


def test_the_loaded_target_hands_over_its_own_tensors(qwen3, llama):
    for folder, tied in ((qwen3, False), (llama, True)):
        target = load_target(TargetConfig(path=str(folder), dtype="float32"), [0])
        weights = shared_weights(target)
        assert weights.embedding.data_ptr() == target.structure.embedding.weight.data_ptr()
        assert (weights.head is weights.embedding) == tied
        assert weights.teacher is None


class Drafter(Stage):
    """A process that takes over what a target hands over, and answers with what it got."""

    def handle(self, message):
        """Sums, and logits of the teacher."""
        teacher = Teacher(message.teacher)
        tied = message.head.data_ptr() == message.embedding.data_ptr()
        shared = message.embedding.is_shared() and all(t.is_shared() for t in message.teacher.tensors.values())
        yield float(message.embedding.sum()), float(message.head.sum()), tied, shared, teacher(message.teacher.states)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_they_cross_to_another_process_in_shared_memory(kind, request):
    target = load_target(TargetConfig(path=str(request.getfixturevalue(kind)), dtype="float32"), [0])
    weights = on_host(shared_weights(target, with_teacher=True))
    worker = WorkerProcess("drafter 0", Drafter, ())
    try:
        worker.connection.recv()
        worker.send(weights)
        embedding, head, tied, shared, logits = worker.connection.recv().payload
    finally:
        worker.stop(5.0)
    assert (embedding, head) == (float(target.embedding.sum()), float(target.head.sum()))
    assert shared and tied == (kind == "llama")
    assert torch.equal(logits, weights.teacher.logits)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
def test_missing_tensors_are_refused(qwen3, tmp_path, name):
    path = spoiled(qwen3, tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(TargetError, match=f"tensors are missing from its files, the first is {name}"):
        load_target(TargetConfig(path=path), [0])
    with pytest.raises(TargetError, match=f"tensors are missing from its files, the first is {name}"):
        embedding_and_head(path)


def test_misshaped_tensors_are_refused(qwen3, tmp_path):
    path = spoiled(qwen3, tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(TargetError, match=r"target\.path") as error:
        load_target(TargetConfig(path=path), [0])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "says"), [("gpt2", "its first layer sees more than the token's embedding"), ("phi", "has a bias")]
)
def test_ends_that_no_drafter_can_share_are_refused_in_words(tmp_path, model_type, says):
    folder = save_tiny(tmp_path, model_type)
    if model_type == "phi":
        path = spoiled(folder, tmp_path, lambda tensors: tensors.update({"lm_head.bias": torch.ones(97)}))
    else:
        path = str(folder)
    with pytest.raises(TargetError, match=says):
        embedding_and_head(path)
    target = load_target(TargetConfig(path=path), [0])
    with pytest.raises(TargetError, match=says):
        _ = (target.embedding, target.head)
