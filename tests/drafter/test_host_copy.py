"""Copies of a state on the host, in memory that is used again."""

from __future__ import annotations

import torch

from drafter_cases import close_window, make_batch, make_learner, small_spec
from paceline.drafter.host_copy import copy_to_host


def test_a_snapshot_shares_nothing_and_keeps_containers_and_values() -> None:
    state = {"a": torch.arange(3.0), "b": [torch.ones(2), 5, None], "c": (torch.zeros(1, dtype=torch.int64), "x")}
    copy = copy_to_host(state)
    state["a"].add_(1)
    state["b"][0].zero_()
    assert copy["a"].tolist() == [0, 1, 2] and copy["b"][0].tolist() == [1, 1] and copy["b"][1:] == [5, None]
    assert isinstance(copy["c"], tuple) and copy["c"][0].dtype == torch.int64 and copy["c"][1] == "x"


def test_memory_is_used_again_where_it_fits_and_only_there() -> None:
    state = {
        "same": torch.ones(3),
        "longer": torch.ones(4),
        "other": torch.ones(2, dtype=torch.int32),
        "new": torch.ones(1),
    }
    before = {"same": torch.zeros(3), "longer": torch.zeros(3), "other": torch.zeros(2), "gone": torch.zeros(9)}
    copy = copy_to_host(state, before)
    assert copy["same"] is before["same"] and copy["longer"] is not before["longer"]
    assert copy.keys() == state.keys()
    assert all(torch.equal(copy[name], tensor) and copy[name].dtype == tensor.dtype for name, tensor in state.items())


def test_a_learners_second_state_is_exact_in_the_memory_of_the_first() -> None:
    """The first has no moments yet, so it fits in parts only."""
    spec = small_spec()
    learner = make_learner(spec)
    state = learner.state_dict()
    for step in (1, 2, 3):
        learner.accumulate(make_batch(spec, [20, 9], seed=step))
        close_window(learner, step)
        pointer = state["network"]["fc.weight"].data_ptr()
        state, fresh = learner.state_dict(state), learner.state_dict()
        assert state["network"]["fc.weight"].data_ptr() == pointer
        assert all(torch.equal(state["network"][name], tensor) for name, tensor in fresh["network"].items())
        for kind, optimizer in fresh["optimizer"].items():
            for index, moments in optimizer["state"].items():
                mine = state["optimizer"][kind]["state"][index]
                assert all(torch.equal(mine[name], tensor) for name, tensor in moments.items())
        assert state["steps_done"] == step
