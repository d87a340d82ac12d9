"""Tapped, early-stopped, padded forward against transformers' own hidden states of single rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.load import load_target
from tiny_targets import target_batch

DOCUMENTS = [[5, 9, 3, 44, 17, 8, 60, 23, 11], [7], [12, 30, 31, 90, 4], [9, 9, 9, 9, 9, 9, 9, 8]]


def reference(model, document, taps) -> torch.Tensor:
    """Features of one document alone, by transformers' ``output_hidden_states`` (entry 0 is the embedding)."""
    with torch.no_grad():
        states = model(input_ids=torch.tensor([document]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1][0] for tap in taps], dim=-1)


@pytest.fixture(params=["qwen3", "llama"])
def folder(request):
    """Folder of a tiny target."""
    return request.getfixturevalue(request.param)


def load(folder, taps, **more):
    return load_target(TargetConfig(path=str(folder), dtype="float32", **more), taps)


@pytest.mark.parametrize("taps", [[0], [0, 2], [1, 2]])
def test_features_equal_hidden_states_of_single_rows(folder, taps):
    target = load(folder, taps)
    batch = target.features(target_batch(DOCUMENTS, width=12))
    expected = torch.cat([reference(target.model, document, taps) for document in DOCUMENTS])
    assert batch.features.shape == (sum(map(len, DOCUMENTS)), len(taps) * 32)
    torch.testing.assert_close(batch.features, expected, atol=1e-5, rtol=0)
    assert batch.last_hidden is None


def test_the_last_layer_is_tapped_before_the_final_norm(folder):
    target = load(folder, [3])
    features, _ = target.tap_rows(torch.tensor([DOCUMENTS[0]]), [9])
    with torch.no_grad():
        whole = target.model(input_ids=torch.tensor([DOCUMENTS[0]]), output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(target.model.model.norm(features), whole, atol=1e-5, rtol=0)
    assert not torch.allclose(features, whole, atol=1e-2)


def test_the_forward_stops_after_the_last_tap(folder):
    target = load(folder, [0, 2])
    ran = []
    for index, layer in enumerate(target.model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    target.model.lm_head.register_forward_hook(lambda *_: ran.append("head"))
    target.features(target_batch(DOCUMENTS))
    assert ran == [0, 1, 2]


def test_teacher_states_come_along_when_asked_for(folder):
    target = load(folder, [1])
    batch = target.features(target_batch(DOCUMENTS), with_last=True)
    expected = torch.cat([reference(target.model, document, [1]) for document in DOCUMENTS])
    torch.testing.assert_close(batch.features, expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([DOCUMENTS[0]])).logits[0]
    ours = target.model.model.norm(batch.last_hidden[:9]) @ target.head.T
    torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)


def test_padding_and_repeated_calls_change_nothing(folder):
    target = load(folder, [0, 2])
    narrow = target.features(target_batch(DOCUMENTS)).features
    for width in (9, 10, 31):
        host = target_batch(DOCUMENTS, width=width)
        torch.testing.assert_close(target.features(host).features, narrow, atol=1e-5, rtol=0)
    other = target_batch(DOCUMENTS, width=12)
    padding = np.arange(12)[None] >= other.lengths[:, None]
    other.ids[padding] = 55
    torch.testing.assert_close(target.features(other).features, narrow, atol=1e-5, rtol=0)


def test_features_go_into_a_given_buffer(folder):
    target = load(folder, [0, 2])
    host = target_batch(DOCUMENTS)
    tokens = sum(map(len, DOCUMENTS))
    buffer = torch.full((tokens * 64 + 10,), 7.0)
    batch = target.features(host, out=buffer)
    assert batch.features.data_ptr() == buffer.data_ptr() and batch.features.shape == (tokens, 64)
    assert torch.equal(batch.features, target.features(host).features)
    assert bool((buffer[tokens * 64 :] == 7).all())
    with pytest.raises(TargetError, match="feature buffer"):
        target.features(host, out=buffer[: tokens * 64 - 1])
    with pytest.raises(TargetError, match="feature buffer"):
        target.features(host, out=buffer.double())


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_features_come_out_in_the_targets_type(qwen3, dtype):
    target = load_target(TargetConfig(path=str(qwen3)), [0, 2], dtype=dtype)
    features = target.features(target_batch(DOCUMENTS)).features
    assert features.dtype == getattr(torch, dtype) == target.dtype
    exact = load(qwen3, [0, 2]).features(target_batch(DOCUMENTS)).features
    assert float((features.float() - exact).norm() / exact.norm()) < 0.02


def test_the_target_is_frozen(folder):
    target = load(folder, [0])
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training
    assert not target.features(target_batch(DOCUMENTS)).features.requires_grad


def test_ids_outside_the_vocabulary_are_refused(folder):
    with pytest.raises(TargetError, match="token id 97 is outside the target's vocabulary of 97"):
        load(folder, [0]).features(target_batch([[1, 97]]))


def test_impossible_taps_are_refused_before_loading(folder):
    with pytest.raises(TargetError, match="no such layer 4"):
        load(folder, [4])
