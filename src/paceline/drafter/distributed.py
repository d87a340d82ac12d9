"""What drafter ranks do together: gradients are added up on the devices, counters on the hosts; all start as one."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import DrafterError, PeerError

Counts = dict[int, tuple[int, int, int, int, int]]


def add_gradients(gradients: Sequence[Tensor], world: dist.ProcessGroup) -> None:
    """Sums each gradient over all ranks, in place; all ranks get the same bits."""
    with collective_errors():
        for gradient in gradients:
            dist.all_reduce(gradient, group=world)


def add_counters(
    counts: Counts, batches: list[int], sums: dict[str, np.ndarray], max_length: int, world: dist.ProcessGroup
) -> tuple[Counts, list[int], dict[str, np.ndarray], int]:
    """Bucket counters, batch indices and sums of all ranks together, in rank order, and their longest sample."""
    everyone: list[Any] = [None] * dist.get_world_size(world)
    with collective_errors():
        dist.all_gather_object(everyone, (counts, batches, sums, max_length), group=world)
    all_counts: Counts = {}
    all_sums: dict[str, np.ndarray] = {}
    for their_counts, _, their_sums, _ in everyone:
        for number, values in their_counts.items():
            before = all_counts.get(number, (0, 0, 0, 0, 0))
            a, b, c, d, e = (x + y for x, y in zip(before, values, strict=True))
            all_counts[number] = (a, b, c, d, e)
        for name, array in their_sums.items():
            all_sums[name] = all_sums[name] + array if name in all_sums else array
    longest = max(length for *_, length in everyone)
    return all_counts, [index for _, theirs, *_ in everyone for index in theirs], all_sums, longest


def any_asks(asked: bool, world: dist.ProcessGroup) -> bool:
    """Whether any rank asks; the same answer on all of them."""
    everyone: list[Any] = [None] * dist.get_world_size(world)
    with collective_errors():
        dist.all_gather_object(everyone, asked, group=world)
    return any(everyone)


def check_equal(parameters: Sequence[Tensor], world: dist.ProcessGroup) -> None:
    """Refuse to go on with ranks whose weights are not the same, bit for bit.

    Raises:
        DrafterError: names the ranks that differ from the first.
    """
    sums = [parameter.detach().view(torch.int32).sum(dtype=torch.int64) for parameter in parameters]
    mine = [int(value) for value in torch.stack(sums).cpu()]
    everyone: list[Any] = [None] * dist.get_world_size(world)
    with collective_errors():
        dist.all_gather_object(everyone, mine, group=world)
    others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others:
        raise DrafterError(
            f"the weights of drafter ranks {others} are no longer those of rank 0; start again from the newest "
            "checkpoint, and look at those devices"
        )


def broadcast_state(state: Any, world: dist.ProcessGroup, device: torch.device) -> Any:
    """The first rank's state on every rank: plain values as they are, tensors one after another.

    Args:
        state: nested dicts and lists of tensors and plain values; used on the first rank only.
        world: the group.
        device: where tensors cross.

    Returns:
        The state, its tensors in host memory.
    """
    tensors: list[Tensor] = []
    with collective_errors():
        shape = [_without_tensors(state, tensors)]
        dist.broadcast_object_list(shape, src=0, group=world, device=device)
        described: list[Any] = [[(tuple(tensor.shape), tensor.dtype) for tensor in tensors]]
        dist.broadcast_object_list(described, src=0, group=world, device=device)
        received = []
        for place, (size, dtype) in enumerate(described[0]):
            first = dist.get_rank(world) == 0
            here = tensors[place].to(device) if first else torch.empty(size, dtype=dtype, device=device)
            dist.broadcast(here, src=0, group=world)
            received.append(here.cpu())
    return _with_tensors(shape[0], received)


@contextmanager
def collective_errors() -> Generator[None, None, None]:
    """What a collective raises when another rank is gone, as a `PeerError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerError(f"another drafter rank is gone ({str(error).splitlines()[0]})") from error


class _Place(int):
    """Where a tensor was."""


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _without_tensors(inner, tensors) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(inner, tensors) for inner in value]
    return value


def _with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value]
    if isinstance(value, dict):
        return {key: _with_tensors(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_tensors(inner, tensors) for inner in value]
    return value
