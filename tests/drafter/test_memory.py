"""The forecast of memory, held against the tensors of a real learner."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drafter_cases import close_window, make_batch, make_learner, small_spec
from paceline.drafter.host_copy import host_copy_bytes
from paceline.drafter.memory import (
    TrainingShape,
    activation_bytes,
    copy_bytes,
    drafter_bytes,
    fitting_positions,
    num_parameters,
    optimizer_bytes,
)
from paceline.drafter.network import Drafter

SPEC = small_spec(
    num_layers=3, block_size=8, hidden_size=64, intermediate_size=160, head_dim=24, layers=("full",) * 3,
    causal=(False,) * 3, vocab_size=500, mask_token_id=499,
)  # fmt: skip
WIDE = small_spec(
    num_layers=2, block_size=8, hidden_size=48, intermediate_size=400, num_attention_heads=8, num_key_value_heads=8,
    head_dim=16, layers=("sliding", "full"), causal=(True, False), sliding_window=20, vocab_size=300, mask_token_id=299,
)  # fmt: skip


def batch_of(spec, dtype):
    lengths = [300, 200]
    return make_batch(spec, lengths, num_anchors=40, masks=[np.ones(n, bool) for n in lengths], dtype=dtype)


def learner_of(spec, dtype, **drafter):
    return make_learner(spec, dtype=dtype, drafter={"diagnose_every": 0, **drafter})


def shape_of(learner, **changes) -> TrainingShape:
    known = {"features": learner.settings.dtype, "on_card": False, **changes}
    return TrainingShape(learner.spec, learner.settings, learner.objective, learner.optimizer_settings, **known)


class LiveMemory(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (list, tuple)) else (output,):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.known:
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        return output

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def test_parameters_are_those_of_the_network():
    for spec in (SPEC, WIDE, small_spec()):
        assert num_parameters(spec) == sum(p.numel() for p in Drafter(spec).parameters())


@pytest.mark.parametrize("spec", [SPEC, WIDE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_within_a_tenth_of_autograd(spec, dtype):
    learner, batch = learner_of(spec, dtype), batch_of(spec, getattr(torch, dtype))
    others = [*learner.parameters, batch.features, learner._head, learner._embedding]
    known, kept = {tensor.untyped_storage().data_ptr() for tensor in others}, {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        learner._measure(batch.host, batch.features, None, learner._window, False)
    positions, tokens = len(batch.host.anchors) * spec.block_size, len(batch.features)
    forecast = activation_bytes(spec, dtype, positions, tokens, False)
    assert sum(kept.values()) == pytest.approx(forecast, rel=0.1)


@pytest.mark.parametrize("spec", [SPEC, WIDE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_peak_of_a_pass_is_near_the_forecast(spec, dtype, recompute):
    learner, batch = learner_of(spec, dtype, recompute=recompute), batch_of(spec, getattr(torch, dtype))
    learner.accumulate(batch)  # so that gradients exist
    with LiveMemory() as memory:
        learner.accumulate(batch)
    needed = drafter_bytes(shape_of(learner), len(batch.features), len(batch.host.anchors) * spec.block_size)
    forecast = needed["activations"] + needed["logits, or the backward pass (estimate)"]
    assert memory.peak == pytest.approx(forecast, rel=0.15)


@pytest.mark.parametrize("optimizer", [{}, {"name": "muon"}, {"state": "8bit"}])
def test_weights_and_states_are_those_of_the_learner(optimizer):
    spec = small_spec(hidden_size=128, intermediate_size=256, num_attention_heads=8, head_dim=16)
    learner = make_learner(spec, optimizer=optimizer)
    learner.accumulate(make_batch(spec, [20]))
    close_window(learner)
    states = [
        tensor
        for each in learner.optimizers.values()
        for state in each.state.values()
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and not name.startswith("qmap") and tensor.numel() > 1
    ]
    held = sum(tensor.nbytes for tensor in states)
    assert optimizer_bytes(spec, learner.optimizer_settings) == pytest.approx(held, rel=0.05)
    if not optimizer:
        assert copy_bytes(spec, learner.optimizer_settings) == pytest.approx(
            host_copy_bytes(learner.state_dict()), rel=0.05
        )
    needed = drafter_bytes(shape_of(learner), 20, 40)
    assert needed["master weights"] == needed["gradients"] == sum(p.nbytes for p in learner.parameters)
    assert needed["embedding and head"] == learner._embedding.nbytes + learner._head.nbytes


def test_positions_that_fit_are_the_most_that_fit():
    shape = shape_of(learner_of(SPEC, "bfloat16"), on_card=True)
    sample = shape.drafter.num_anchors * SPEC.block_size
    for positions in (1, 3, 40):
        room = sum(drafter_bytes(shape, 500, positions * sample).values())
        assert fitting_positions(shape, 500, room) == positions * sample
        assert fitting_positions(shape, 500, room - 1) == max(1, positions - 1) * sample
