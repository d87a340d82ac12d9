"""Documents that share one row: equal to single rows where that is proved, refused where it is not."""

from __future__ import annotations

import pytest
import torch

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target.guard import guard_first_batch
from paceline.target.load import load_target
from tiny_architectures import build, tiny_config
from tiny_targets import host_batch

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
    path = saved(tmp_path, model_type)
    packed, padded = (
        load_target(TargetConfig(path=path, dtype="float32", rows=rows, attention=attention), [0, 2])
        for rows in ("packed", "padded")
    )
    host = host_batch(DOCUMENTS)
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
    target.features(host_batch(DOCUMENTS, width=40))
    assert seen == [(1, 25)]


@pytest.mark.parametrize("model_type", ["mamba2", "falcon_h1", "bloom", "gpt_oss"])
def test_states_that_run_on_are_refused(tmp_path, model_type):
    path = saved(tmp_path, model_type)
    with pytest.raises(TargetError, match=r"target.rows = packed: .*; set target.rows to padded") as fault:
        load_target(TargetConfig(path=path, dtype="float32", rows="packed"), [0, 2])
    assert len(fault.value.faults) == 1 and "\n" not in str(fault.value)


def test_chunks_cut_by_the_place_in_the_row_are_noticed(tmp_path, monkeypatch):
    """transformers counts chunks from each document's start; a mask that counts them along the row is refused."""
    from transformers import masking_utils

    more = {"attention_chunk_size": 16, "layer_types": ["chunked_attention"] * 4}
    settings = TargetConfig(path=saved(tmp_path, "llama4_text", **more), dtype="float32", rows="packed")
    target = load_target(settings, [0, 2])
    guard_first_batch(target, target.features(host_batch(DOCUMENTS)))
    monkeypatch.setattr(masking_utils, "remap_positions_for_packed_sequence", lambda mask, positions: mask)
    with pytest.raises(TargetError, match=r"lets documents that share a row see one another"):
        load_target(settings, [0, 2])
