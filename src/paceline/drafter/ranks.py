"""Adding up over drafter ranks: gradients on the devices, counters on the hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

Counts = dict[int, tuple[int, int, int, int, int]]


def add_gradients(gradients: Sequence[Tensor], world: dist.ProcessGroup) -> None:
    """Sums each gradient over all ranks, in place; all ranks get the same bits."""
    for gradient in gradients:
        dist.all_reduce(gradient, group=world)


def add_counters(
    counts: Counts, batches: list[int], sums: dict[str, np.ndarray], max_length: int, world: dist.ProcessGroup
) -> tuple[Counts, list[int], dict[str, np.ndarray], int]:
    """Bucket counters, batch indices and sums of all ranks together, in rank order, and their longest sample."""
    everyone: list[Any] = [None] * dist.get_world_size(world)
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
