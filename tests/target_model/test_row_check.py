"""Rows without a mask, and documents that share one row: equal to masked single rows where that is proved."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fake_card import fake_card
from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.load import load_target
from paceline.target_model.row_check import needs_mask
from paceline.target_model.tap_guard import guard_first_batch
from tiny_architectures import build, tiny_config
from tiny_targets import target_batch

DOCUMENTS = [[5, 9, 3, 44, 17, 8, 60, 23, 11, 7, 31], [12], [12, 30, 31, 90, 4, 5, 6, 7, 8, 9, 10, 11, 12]]


def saved(folder, model_type, **more):
    build(tiny_config(model_type, **more)).save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        *(("qwen3", "sdpa"), ("qwen3", "eager"), ("llama", "sdpa"), ("gemma2", "eager"), ("gemma3_text", "sdpa")),
        *(("qwen3_moe", "sdpa"), ("deepseek_v3", "sdpa"), ("gpt2", "sdpa"), ("llama4_text", "eager")),
    ],
)
def test_packed_equals_padded(tmp_path, model_type, attention):
    path = saved(tmp_path, model_type, **({"attention_chunk_size": 64} if model_type == "llama4_text" else {}))
    packed, padded = (
        load_target(TargetConfig(path=path, dtype="float32", rows=rows, attention=attention), [0, 2])
        for rows in ("packed", "padded")
    )
    host = target_batch(DOCUMENTS)
    found = packed.features(host, with_last=True)
    expected = padded.features(host, with_last=True)
    guard_first_batch(packed, found)
    assert found.features.shape == expected.features.shape
    scale = max(1.0, float(expected.features.abs().max()))
    assert torch.allclose(found.features, expected.features, atol=1e-5 * scale)
    assert torch.allclose(found.last_hidden, expected.last_hidden, atol=1e-5 * scale)


def test_packed_rows_run_no_padding(tmp_path):
    target = load_target(TargetConfig(path=saved(tmp_path, "qwen3"), dtype="float32", rows="packed"), [0])
    seen = []
    target.structure.embedding.register_forward_hook(lambda module, args, output: seen.append(output.shape[:2]))
    target.features(target_batch(DOCUMENTS, width=40))
    assert seen == [(1, 25)]


@pytest.mark.parametrize("model_type", ["mamba2", "falcon_h1", "bloom", "gpt_oss"])
def test_states_that_run_on_are_refused(tmp_path, model_type):
    path = saved(tmp_path, model_type)
    with pytest.raises(TargetError, match=r"target.rows = packed: .*; set target.rows to padded") as error:
        load_target(TargetConfig(path=path, dtype="float32", rows="packed"), [0, 2])
    assert len(error.value.errors) == 1 and "\n" not in str(error.value)


def test_chunks_cut_by_the_place_in_the_row_are_noticed(tmp_path, monkeypatch):
    """transformers counts chunks from each document's start; a mask that counts them along the row is refused."""
    from transformers import masking_utils

    more = {"attention_chunk_size": 16, "layer_types": ["chunked_attention"] * 4}
    settings = TargetConfig(path=saved(tmp_path, "llama4_text", **more), dtype="float32", rows="packed")
    target = load_target(settings, [0, 2])
    guard_first_batch(target, target.features(target_batch(DOCUMENTS)))
    monkeypatch.setattr(masking_utils, "remap_positions_for_packed_sequence", lambda mask, positions: mask)
    with pytest.raises(TargetError, match=r"lets documents that share a row see one another"):
        load_target(settings, [0, 2])


@pytest.mark.parametrize("model_type", ["qwen3_next", "nemotron_h", "zamba2", "lfm2"])
def test_states_that_run_on_are_refused_in_16_bits_too(tmp_path, model_type):
    """Their first tokens alone differ, by less than rounding is allowed or too few to move a median."""
    path = saved(tmp_path, model_type, initializer_range=0.02)
    with pytest.raises(TargetError, match=r"see one another: at layer \d+ their states follow a change"):
        load_target(TargetConfig(path=path, dtype="bfloat16", rows="packed"), [0, 2])


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "gemma3_text", "deepseek_v3"])
def test_noise_of_16_bits_is_no_leak(tmp_path, model_type):
    target = load_target(TargetConfig(path=saved(tmp_path, model_type), dtype="bfloat16", rows="packed"), [0, 2])
    found = guard_first_batch(target, target.features(target_batch(DOCUMENTS)))
    assert [entry.layer for entry in found] == [0, 2]


def test_a_late_leak_between_documents_stops_the_first_batch(tmp_path, monkeypatch):
    """The trial at the start is too short to notice; a real batch is not."""
    from paceline.target_model import model as module

    honest = module.packed_arguments

    def late(model, ids, lengths, keep):
        arguments = honest(model, ids, lengths, keep)
        positions = arguments["position_ids"]
        if positions.shape[1] > 100:  # from there on the row is one document to the mask
            positions[0, 100:] = positions[0, 99] + 1 + torch.arange(positions.shape[1] - 100)
        return arguments

    settings = TargetConfig(path=saved(tmp_path, "qwen3"), dtype="bfloat16", rows="packed")
    target = load_target(settings, [0, 2])
    monkeypatch.setattr(module, "packed_arguments", late)
    few = [[3 + n % 90 for n in range(size)] for size in (3, 50, 30, 19, 9)]
    with pytest.raises(TargetError, match=r"tap guard: batch 3: layer 0: documents that share a row follow"):
        guard_first_batch(target, target.features(target_batch(few)))


def waits_of_host(work) -> list[str]:
    """Operations for which the host waits on a GPU, as they are met while some work runs on the CPU."""
    found = []

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if name in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"):
                found.append(name)
            return func(*args, **(kwargs or {}))

    with Waits():
        work()
    return found


DENSE = ["qwen3", "llama", "mistral", "gemma2", "gemma3_text", "gpt2", "bloom", "qwen3_moe", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", DENSE)
def test_causal_attention_needs_no_mask(tmp_path, model_type, dtype):
    target = load_target(TargetConfig(path=saved(tmp_path, model_type), dtype=dtype), [0, 2])
    assert not target.masked
    host = target_batch(DOCUMENTS, width=40)
    found = target.features(host, with_last=True)
    expected = target.with_layout(masked=True, packed=False).features(host, with_last=True)
    for ours, theirs in ((found.features, expected.features), (found.last_hidden, expected.last_hidden)):
        error = (ours.float() - theirs.float()).norm(dim=1) / theirs.float().norm(dim=1)
        assert float(error.median()) < (1e-6 if dtype == "float32" else 2e-2)
    guard_first_batch(target, found)


@pytest.mark.parametrize(
    "model_type", ["qwen3_next", "qwen3_5_text", "mamba2", "falcon_h1", "lfm2", "jamba", "recurrent_gemma", "rwkv"]
)
def test_recurrent_targets_keep_their_mask(tmp_path, model_type):
    assert load_target(TargetConfig(path=saved(tmp_path, model_type), dtype="float32"), [0, 2]).masked


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_sees_later_tokens_keeps_its_mask(tmp_path, attention, dtype):
    path = saved(tmp_path, "llama", is_causal=False)
    settings = TargetConfig(path=path, dtype=dtype, attention=attention)
    assert load_target(settings, [0, 2]).masked


def test_a_slight_look_at_the_padding_keeps_the_mask(tmp_path):
    """Less than rounding in 16 bits allows; only that a changed padding is followed shows it."""
    target = load_target(TargetConfig(path=saved(tmp_path, "qwen3"), dtype="bfloat16"), [0, 2])
    assert not needs_mask(target)

    def peeking(module, args, output):
        output[:, 0] += 0.02 * output[:, -1]

    target.structure.layers[1].register_forward_hook(peeking)
    assert needs_mask(target)


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "mistral", "gemma2", "gemma3_text", "gpt2"])
def test_the_host_waits_for_nothing_in_a_forward_without_mask(tmp_path, model_type):
    target = load_target(TargetConfig(path=saved(tmp_path, model_type), dtype="float32"), [0, 2])
    host = target_batch(DOCUMENTS, width=40)
    assert waits_of_host(lambda: target.features(host, with_last=True)) == []
    assert target.model(torch.tensor([[5, 9]])) is not None, "what was switched off works again"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", "llama", "mistral", "gemma2", "gemma3_text", "gpt2"])
def test_a_forward_on_a_card_stays_on_that_card(tmp_path, monkeypatch, model_type, masked):
    """Fake tensors on a card that is not there: what mixes devices, or reads a value, raises."""
    target = load_target(TargetConfig(path=saved(tmp_path, model_type), dtype="float32"), [0, 2])
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    host = target_batch(DOCUMENTS, width=40)
    with fake_card(target.model, "cuda:3"):
        batch = target.with_layout(masked=masked, packed=False).features(host, with_last=True)
        assert str(batch.features.device) == str(batch.last_hidden.device) == "cuda:3"
        assert batch.features.shape == (25, 64)
        with pytest.raises(RuntimeError, match="same device"):
            torch.add(batch.features, torch.zeros(25, 64))
