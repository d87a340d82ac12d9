"""Copies of a learner's state in the host's memory, made in one block that is used again.

Fresh memory costs more than the copy itself (2.6 times the whole on one core), and page-locking it for CUDA far more.
One block also holds no more than is needed: torch rounds every page-locked tensor up to a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.device import Mark, page_lock, page_unlock

ALIGNMENT = 64
"""Each tensor begins at a multiple of this many bytes."""


class StateWriter(Protocol):
    """Writes states of the learner in the background, one after another."""

    def put(self, step: int, state: Mapping[str, Any], note: Mapping[str, Any]) -> None:
        """Begin to write the state after a step."""
        ...

    def check(self) -> None:
        """Raise what has gone wrong since the last look; never waits."""
        ...

    def wait(self) -> None:
        """Until everything is on disk, or raise."""
        ...


class HostCopy:
    """Copies states whose tensors are on one device, each into the memory of the copy before.

    Args:
        device: of the tensors; for a card the memory is page-locked.
    """

    def __init__(self, device: str | torch.device) -> None:
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8)

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The same containers and values, with whole copies of the tensors, in memory that nothing else changes.

        The copy before is overwritten: whoever reads it must be done.
        """
        size = host_copy_bytes(state)
        if self._block.nbytes != size:
            page_unlock(self._block, self._device)
            self._block = torch.empty(size, dtype=torch.uint8)
            page_lock(self._block, self._device)
        places = _Places(self._block)
        copied = {key: _copied(value, places) for key, value in state.items()}
        # The copies are queued behind the optimizer step on the device's stream; who reads now would read old bytes.
        Mark(self._device).wait()
        return copied


def host_copy_bytes(state: Any) -> int:
    """Bytes of the block that holds a copy of a state."""
    if isinstance(state, Tensor):
        return _rounded(state.nbytes)
    if isinstance(state, Mapping):
        return sum(host_copy_bytes(value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return sum(host_copy_bytes(value) for value in state)
    return 0


class _Places:
    """Hands out the block's memory, one tensor after another."""

    def __init__(self, block: Tensor) -> None:
        self._memory, self._used = block.numpy(), 0

    def __call__(self, like: Tensor) -> Tensor:
        begin = self._used
        self._used += _rounded(like.nbytes)
        # By way of numpy each tensor has its own storage; torch.save writes whole storages.
        part = torch.from_numpy(self._memory[begin : begin + like.nbytes])
        return part.view(like.dtype).view(like.shape)


def _copied(value: Any, places: _Places) -> Any:
    if isinstance(value, Tensor):
        return places(value).copy_(value.detach(), non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _copied(inner, places) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(inner, places) for inner in value)
    return value


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
