"""Copies of a state on the host: whole before anybody reads them, in memory that is used again."""

from __future__ import annotations

import io

import pytest
import torch

from drafter_cases import close_window, make_batch, make_learner, small_spec
from fake_cuda import fake_cuda
from paceline.checkpoint import checkpoints
from paceline.checkpoint.checkpoints import CheckpointWriter
from paceline.config import CheckpointConfig
from paceline.device import own_device
from paceline.drafter.host_copy import HostCopy, host_copy_bytes


def trained(device: str = "cpu"):
    learner = make_learner(small_spec(), device=device)
    learner.accumulate(make_batch(learner.spec, [20, 9], seed=1))
    close_window(learner)
    return learner


def test_a_copy_shares_nothing_and_keeps_containers_and_values() -> None:
    state = {"a": torch.arange(3.0), "b": [torch.ones(2).bfloat16(), 5, None], "c": {7: (torch.zeros(()), "x")}}
    copy = HostCopy("cpu").take(state)
    state["a"].add_(1)
    state["b"][0].zero_()
    assert copy["a"].tolist() == [0, 1, 2] and copy["b"][0].tolist() == [1, 1] and copy["b"][1:] == [5, None]
    assert copy["b"][0].dtype == torch.bfloat16
    assert isinstance(copy["c"][7], tuple) and copy["c"][7][0].shape == () and copy["c"][7][1] == "x"


def test_the_block_is_as_large_as_forecast_and_used_again() -> None:
    copies, learner = HostCopy("cpu"), trained()
    first = copies.take(learner.state_dict())
    block = copies._block
    assert block.nbytes == host_copy_bytes(learner.state_dict())
    assert host_copy_bytes({"a": [torch.ones(17)], "b": {"c": (torch.ones(3, dtype=torch.int8), 2)}}) == 128 + 64
    learner.accumulate(make_batch(learner.spec, [20, 9], seed=2))
    close_window(learner, 2)
    second = copies.take(learner.state_dict())
    assert (
        copies._block is block and second["network"]["fc.weight"].data_ptr() == first["network"]["fc.weight"].data_ptr()
    )
    assert all(torch.equal(second["network"][name], value) for name, value in learner.network.state_dict().items())
    moments = learner.state_dict()["optimizer"]["adamw"]["state"]
    for index, found in second["optimizer"]["adamw"]["state"].items():
        assert all(torch.equal(value, moments[index][name]) for name, value in found.items())


def test_each_tensor_is_saved_without_the_rest_of_the_block() -> None:
    copy = HostCopy("cpu").take({"small": torch.ones(3), "large": torch.ones(100_000)})
    file = io.BytesIO()
    torch.save({"small": copy["small"]}, file)
    assert len(file.getvalue()) < 5_000


@pytest.mark.parametrize("card", [0, 3])
def test_a_checkpoint_of_a_lagging_card_holds_the_new_values(tmp_path, monkeypatch, card) -> None:
    """Two checkpoints: what is read too early is garbage in the first, and the first one's bytes in the second."""
    with fake_cuda(monkeypatch) as cuda:
        own_device(f"cuda:{card}")
        learner, writer = trained(f"cuda:{card}"), CheckpointWriter(tmp_path, CheckpointConfig(keep_last=5))
        for step in (1, 2):
            learner.save(writer, step, {})
            writer.wait()
            found = checkpoints.read_checkpoint(tmp_path, step)
            moments = learner.state_dict()["optimizer"]["adamw"]["state"]
            assert all(torch.equal(found["network"][name], p) for name, p in learner.network.state_dict().items())
            assert all(
                torch.equal(found["optimizer"]["adamw"]["state"][index][name], value)
                for index, of in moments.items()
                for name, value in of.items()
            )
            learner.accumulate(make_batch(learner.spec, [20, 9], seed=step))
            close_window(learner, step + 1)
        assert cuda.copies > 20 and cuda.contexts == {card} and len(cuda.locked) == 1
