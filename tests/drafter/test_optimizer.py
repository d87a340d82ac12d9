"""Optimizers: every choice of state against plain AdamW or Muon."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from drafter_cases import close_window, make_batch, make_learner, small_spec, state_of
from drafter_ranks import train_together
from paceline.config import OptimizerConfig
from paceline.errors import DrafterError

WIDE = small_spec(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
"""Matrices of more than 4,096 numbers: smaller ones keep float32 moments."""


def trained(steps: int, learner=None, first: int = 1, **optimizer):
    learner = learner or make_learner(WIDE, optimizer={"lr": 3e-3, **optimizer})
    for step in range(first, first + steps):
        learner.accumulate(make_batch(WIDE, [20, 31], seed=step))
        close_window(learner, step)
    return learner


def assert_equal(one, other) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert np.array_equal(one, other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_shared_out_state_gives_the_same_weights(tmp_path, name):
    plain, sharded = (
        train_together(folder, {"name": name, "shard": shard}, steps=3)
        for folder, shard in ((tmp_path / "plain", False), (tmp_path / "sharded", True))
        if not folder.mkdir()
    )
    for rank, ((_, whole, _), (_, parts, _)) in enumerate(zip(plain, sharded, strict=True)):
        assert_equal(whole["network"], parts["network"])
        for kind, optimizer in whole["optimizer"].items():
            assert_equal(optimizer["state"] if rank == 0 else {}, parts["optimizer"][kind]["state"])
    held = [held for *_, held in sharded]
    assert max(held) < 0.75 * plain[0][2] and sum(held) == plain[0][2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_state_resumes_whether_it_is_shared_out_or_not(tmp_path):
    (_, state, _), _ = train_together(tmp_path, {"shard": True}, steps=2)
    tensors = torch.utils._pytree.tree_map(lambda v: torch.from_numpy(v) if isinstance(v, np.ndarray) else v, state)
    learner = make_learner(small_spec())
    learner.load_state_dict(tensors)
    assert learner.steps_done == 2
    moments = learner.state_dict()["optimizer"]["adamw"]["state"]
    assert_equal({i: dict(s) for i, s in moments.items()}, tensors["optimizer"]["adamw"]["state"])


def test_8bit_state_is_near_plain_adamw_and_small():
    plain, lean, start = trained(20), trained(20, state="8bit"), make_learner(WIDE)
    far = near = 0.0
    for ours, theirs, before in zip(lean.parameters, plain.parameters, start.parameters, strict=True):
        near += float((ours - theirs).detach().norm() ** 2)
        far += float((theirs - before).detach().norm() ** 2)
    assert 0 < near < 0.1**2 * far, "what 8 bits change is small beside what was learned"

    def moments(learner) -> int:
        names = ("exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
        states = learner.optimizers["adamw"].state.values()
        return sum(state[name].nbytes for state in states for name in names if name in state)

    assert moments(lean) < 0.4 * moments(plain), "matrices below 4,096 numbers keep float32"


def test_8bit_state_resumes_bit_for_bit():
    straight, stopped = trained(6, state="8bit"), trained(3, state="8bit")
    file = io.BytesIO()
    torch.save(state_of(stopped), file)
    file.seek(0)
    again = make_learner(WIDE, seed=9, optimizer={"lr": 3e-3, "state": "8bit"})
    again.load_state_dict(torch.load(file, weights_only=True))
    trained(3, again, first=4)
    assert all(torch.equal(*pair) for pair in zip(straight.parameters, again.parameters, strict=True))


def test_what_cannot_be_is_refused(monkeypatch):
    with pytest.raises(ValidationError, match="8bit is AdamW's"):
        OptimizerConfig(name="muon", state="8bit")
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)
    with pytest.raises(DrafterError, match=r"needs bitsandbytes.*pip install 'paceline\[quantize\]'"):
        make_learner(WIDE, optimizer={"state": "8bit"})


def test_a_trajectory_equals_plain_adamw():
    """Gradients below the clipping norm, weight decay on matrices only, warm-up: as torch's AdamW by hand."""
    settings = {"lr": 1e-2, "weight_decay": 0.3, "clip_norm": 1e3, "warmup": 0.2, "schedule": "linear"}
    learner = make_learner(small_spec(), total_steps=10, optimizer=settings)
    with torch.no_grad():
        for parameter in learner.parameters:
            parameter.add_(torch.linspace(-0.3, 0.4, parameter.numel()).view(parameter.shape))
    copies = [parameter.detach().clone().requires_grad_() for parameter in learner.parameters]
    groups = [
        {"params": [copy for copy in copies if copy.ndim == 2], "weight_decay": 0.3},
        {"params": [copy for copy in copies if copy.ndim == 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(4):
        learner.accumulate(make_batch(small_spec(), [20, 9], seed=step))
        gradients = [parameter.grad.clone() for parameter in learner.parameters]
        report = close_window(learner, step + 1)
        assert report.gradient_norm < 1e3
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient / report.loss.denominator
        for group in plain.param_groups:
            group["lr"] = 1e-2 * ((step + 1) / 3 if step < 2 else 1 - (step - 2) / 8)
        plain.step()
        for parameter, copy in zip(learner.parameters, copies, strict=True):
            torch.testing.assert_close(parameter, copy, rtol=1e-5, atol=1e-7)
