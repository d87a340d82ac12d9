"""What drafter ranks do together: add gradients on the devices and counters on the hosts, compare, start equal.

Only tensors and MessagePack cross the network, never pickles: what a rank receives cannot run code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import DrafterError, PeerError

Plain = TypeVar("Plain")

TENSOR = "__tensor__"
"""Key of what takes a tensor's place in the outline of a state: its type and shape."""


def add_gradients(gradients: Sequence[Tensor], world: dist.ProcessGroup) -> None:
    """Sums each gradient over all ranks, in place; all ranks get the same bits."""
    with collective_errors():
        for gradient in gradients:
            dist.all_reduce(gradient, group=world)


def gather_plain(value: Plain, kind: type[Plain], world: dist.ProcessGroup, device: torch.device) -> list[Plain]:
    """Every rank's value, in rank order.

    Args:
        value: plain values, arrays and dataclasses of them; arrays arrive as lists.
        kind: type of the value, to which what arrives is checked.
        world: the group.
        device: where the bytes cross.
    """
    mine = _encoded(value, device)
    with collective_errors():
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(world))]
        dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group=world)
        counts = [int(size) for size in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
        padded[: len(mine)] = mine
        everyone = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everyone, padded, group=world)
    return [
        msgspec.msgpack.decode(theirs[:count].cpu().numpy().tobytes(), type=kind)
        for theirs, count in zip(everyone, counts, strict=True)
    ]


def any_rank(asked: bool, world: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether any rank asks; the same answer on all of them."""
    return any(gather_plain(asked, bool, world, device))


def check_equal(parameters: Sequence[Tensor], world: dist.ProcessGroup) -> None:
    """Refuse to continue with ranks whose weights are not the same, bit for bit.

    Raises:
        DrafterError: names the ranks that differ from the first.
    """
    sums = [parameter.detach().view(torch.int32).sum(dtype=torch.int64) for parameter in parameters]
    mine = torch.stack(sums)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(world))]
    with collective_errors():
        dist.all_gather(everyone, mine, group=world)
    others = [rank for rank, theirs in enumerate(everyone) if not torch.equal(theirs, everyone[0])]
    if others:
        raise DrafterError(
            f"the weights of drafter ranks {others} are not those of rank 0 any more; start again from the newest "
            "checkpoint, and look at those devices"
        )


def owners(mine: Sequence[bool], world: dist.ProcessGroup, device: torch.device) -> list[int | None]:
    """For each of some things the first rank that has it; None where no rank does."""
    flags = torch.tensor(mine, dtype=torch.uint8, device=device)
    everyone = [torch.empty_like(flags) for _ in range(dist.get_world_size(world))]
    with collective_errors():
        dist.all_gather(everyone, flags, group=world)
    table = torch.stack(everyone).tolist()
    return [next((rank for rank, has in enumerate(column) if has), None) for column in zip(*table, strict=True)]


def broadcast_state(state: Any, world: dist.ProcessGroup, device: torch.device, source: int = 0) -> Any:
    """One rank's state on every rank: its outline as plain values, then one tensor after another.

    Args:
        state: nested dicts and lists of tensors and plain values; used on the source only.
        world: the group.
        device: where tensors cross.
        source: rank of the group that has the state.

    Returns:
        The state, its tensors in host memory; tuples arrive as lists.
    """
    gives = dist.get_rank(world) == source
    encoded = _encoded(_outline(state), device) if gives else torch.empty(0, dtype=torch.uint8, device=device)

    def send(tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, group=world, group_src=source)
        return tensor

    with collective_errors():
        size = int(send(torch.tensor([len(encoded)], device=device)))
        encoded = send(encoded if gives else torch.empty(size, dtype=torch.uint8, device=device))
        outline = msgspec.msgpack.decode(encoded.cpu().numpy().tobytes())
        return _received(outline, state if gives else None, send, device)


@contextmanager
def collective_errors() -> Generator[None, None, None]:
    """What a collective raises when another rank is gone, as a `PeerError`; errors of this rank's own device pass.

    CUDA reports an error of a kernel at a later call, which may be a collective (`torch.AcceleratorError`).
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        if "cuda error" in str(error).lower():  # NCCL writes "unhandled cuda error"
            raise
        raise PeerError(f"another drafter rank is gone ({str(error).splitlines()[0]})") from error


def _encoded(value: Any, device: torch.device) -> Tensor:
    data = msgspec.msgpack.encode(value, enc_hook=_plain)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} does not cross between ranks")


def _outline(value: Any) -> Any:
    """The state with each tensor replaced by its type and shape."""
    if isinstance(value, Tensor):
        return {TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        return {key: _outline(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_outline(inner) for inner in value]
    return value


def _received(outline: Any, mine: Any, send: Callable[[Tensor], Tensor], device: torch.device) -> Any:
    """The state of an outline; `mine` is the source's state, None on the other ranks."""
    if isinstance(outline, dict) and TENSOR in outline:
        kind, shape = outline[TENSOR]
        here = torch.empty(shape, dtype=getattr(torch, kind), device=device) if mine is None else mine.to(device)
        return send(here).cpu()
    if isinstance(outline, dict):
        return {key: _received(inner, mine and mine[key], send, device) for key, inner in outline.items()}
    if isinstance(outline, list):
        return [_received(inner, mine and mine[place], send, device) for place, inner in enumerate(outline)]
    return outline
