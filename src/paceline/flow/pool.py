"""The reusable tensor pool: shared buffers through which features cross processes; only a buffer's number travels."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import StageError

SHARED_MEMORY = Path("/dev/shm")


class BufferPool:
    """Equal flat buffers in shared memory, viewed as [tokens, columns].

    The pool itself keeps no record of who uses what: the hub hands buffer numbers out and takes them back, and the
    number of free ones is the backpressure between target and drafter.

    Args:
        num_buffers: how many.
        max_tokens: real tokens of the largest micro-batch.
        columns: feature values per token (taps × hidden size).
        dtype: type of the features.
        last_columns: further values per token (hidden size) where an objective needs the target's last states.

    Raises:
        StageError: the machine's shared memory is too small, with what is needed and what to lower.
    """

    def __init__(
        self, num_buffers: int, max_tokens: int, columns: int, dtype: torch.dtype, last_columns: int = 0
    ) -> None:
        self.num_buffers, self.max_tokens, self.columns, self.dtype = num_buffers, max_tokens, columns, dtype
        self.last_columns = last_columns
        self._check_room()
        numbers = max_tokens * (columns + last_columns)
        self.storage = torch.empty((num_buffers, numbers), dtype=dtype).share_memory_()

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.num_buffers * self.max_tokens * (self.columns + self.last_columns) * self.dtype.itemsize

    def view(self, buffer: int, tokens: int) -> Tensor:
        """The first ``tokens`` rows of a buffer, [tokens, columns]."""
        return self.storage[buffer, : tokens * self.columns].view(tokens, self.columns)

    def last_view(self, buffer: int, tokens: int) -> Tensor | None:
        """The target's last states in a buffer, [tokens, last columns]; None where they do not travel."""
        if not self.last_columns:
            return None
        start = self.max_tokens * self.columns
        return self.storage[buffer, start : start + tokens * self.last_columns].view(tokens, self.last_columns)

    def _check_room(self) -> None:
        if not SHARED_MEMORY.is_dir():
            return
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < self.num_bytes:
            raise StageError(
                f"shared memory: {self.num_buffers} feature buffers need {self.num_bytes / 2**20:.0f} MiB, "
                f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free; lower plan.token_budget or flow.pool_buffers, "
                "or give the container more (docker: --shm-size)"
            )
