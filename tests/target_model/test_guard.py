"""The tap guard stops every error that would train without an error."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.load import load_target
from paceline.target_model.model import TargetModel
from paceline.target_model.tap_guard import check_features, guard_first_batch
from tiny_targets import target_batch

HOST = target_batch([[5, 9, 3, 44, 17, 8, 60, 23, 11], [7, 4], [12, 30, 31, 90, 4]], width=12)


@pytest.fixture
def target(qwen3) -> TargetModel:
    """A fresh tiny target with two taps."""
    return load_target(TargetConfig(path=str(qwen3), dtype="float32"), [0, 2])


def test_a_sound_target_passes(target):
    found = guard_first_batch(target, target.features(HOST))
    assert [entry.layer for entry in found] == [0, 2]
    assert all(entry.rms > 0 and entry.variance > 0 for entry in found)
    assert all(entry.batch_error < 1e-5 and entry.shift_change > 0.05 for entry in found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sound_target_passes_in_sixteen_bits(qwen3, dtype):
    target = load_target(TargetConfig(path=str(qwen3), dtype=dtype), [0, 2])
    assert len(guard_first_batch(target, target.features(HOST))) == 2


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda states: states.zero_(), "layer 2: min 0, max 0: all states are zero"),
        (lambda states: states.fill_(1.5), "layer 2: min 1.5, max 1.5: every token has the same states"),
        (lambda states: states[4:6].fill_(float("nan")), "layer 2: .* 2 of 16 tokens are not finite"),
        (lambda states: states[0, 3].fill_(float("inf")), "layer 2: .* 1 of 16 tokens are not finite"),
    ],
)
def test_states_that_say_nothing_are_named(target, spoil, says):
    batch = target.features(HOST)
    spoil(batch.features[:, 32:])
    with pytest.raises(TargetError, match=says):
        check_features(batch, target.taps, 32)


def test_a_wrong_shape_is_refused(target):
    batch = target.features(HOST)
    with pytest.raises(TargetError, match="instead of"):
        check_features(dataclasses.replace(batch, features=batch.features[:-1]), target.taps, 32)


def leaking(layer, how):
    """Makes a layer change its states by `how`."""
    layer.register_forward_hook(lambda _, args, output: how(output))


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(lambda states: states + states.mean(0, keepdim=True), id="rows see one another"),
        pytest.param(lambda states: states + states[:, -1:], id="rows see what follows"),
        pytest.param(lambda states: states * (1 + states.shape[1] / 100), id="rows see the padded width"),
    ],
)
def test_leaks_are_refused(target, how):
    leaking(target.structure.layers[1], how)
    with pytest.raises(TargetError, match=r"layer 2: the first \d+ tokens of sample 10\d alone differ"):
        guard_first_batch(target, target.features(HOST))


def test_state_left_over_from_an_earlier_call_is_refused(target):
    calls = []
    leaking(target.structure.layers[1], lambda states: states + 0.1 * (calls.append(1) or len(calls)))
    with pytest.raises(TargetError, match="layer 2"):
        guard_first_batch(target, target.features(HOST))


def test_a_tap_whose_neighbour_is_the_same_is_refused(target):
    layer = target.structure.layers[3]
    layer.register_forward_hook(lambda _, args, output: args[0])
    with pytest.raises(TargetError, match="layer 2: the neighbouring layer has the same states"):
        guard_first_batch(target, target.features(HOST))


def test_padding_on_the_left_is_noticed(target):
    rows = torch.tensor(HOST.ids)
    for row, length in enumerate(HOST.lengths):
        rows[row] = rows[row].roll(12 - int(length))
    shifted = dataclasses.replace(HOST, ids=rows.numpy())
    batch = dataclasses.replace(target.features(shifted), host=HOST)
    with pytest.raises(TargetError, match="alone differ"):
        guard_first_batch(target, batch)
