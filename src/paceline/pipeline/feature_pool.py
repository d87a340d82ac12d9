"""The reusable tensor pool: shared buffers through which features cross processes; only a buffer's number travels.

Shape letters: S tokens of a micro-batch, N taps, H hidden size.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from paceline.device import page_lock
from paceline.errors import StageError

SHARED_MEMORY = Path("/dev/shm")

Transport = Literal["exact", "bf16", "fp8"]
"""How features cross: as the target made them; as bfloat16; as float8 with a scale for each token and tap."""

_FP8 = torch.float8_e4m3fn


class FeaturePool:
    """Equal flat buffers in shared memory, viewed as [tokens, columns].

    The pool itself keeps no record of who uses what: the hub hands buffer numbers out and takes them back, and the
    number of free ones is the backpressure between target and drafter.

    Args:
        num_buffers: how many.
        max_tokens: real tokens of the largest micro-batch.
        columns: feature values per token (taps × hidden size).
        dtype: type of the features.
        last_columns: further values per token (hidden size) where an objective needs the target's last states.
        transport: how features cross; the last states always cross as they are.
        taps: of `columns`, which have scales of their own in fp8.

    Raises:
        StageError: the machine's shared memory is too small, with what is needed and what to lower.
    """

    def __init__(
        self,
        num_buffers: int,
        max_tokens: int,
        columns: int,
        dtype: torch.dtype,
        last_columns: int = 0,
        *,
        transport: Transport = "exact",
        taps: int = 1,
    ) -> None:
        self.num_buffers, self.max_tokens, self.columns, self.dtype = num_buffers, max_tokens, columns, dtype
        self.last_columns, self.transport, self.taps = last_columns, transport, taps
        self._stored = {"exact": dtype, "bf16": torch.bfloat16, "fp8": _FP8}[transport]
        self._check_room()
        self.storage = torch.zeros((num_buffers, max_tokens * columns), dtype=self._stored).share_memory_()
        self.last = torch.zeros((num_buffers, max_tokens * last_columns), dtype=dtype).share_memory_()
        scales = max_tokens * taps if transport == "fp8" else 0
        self.scales = torch.zeros((num_buffers, scales), dtype=torch.float32).share_memory_()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in a buffer."""
        scales = 4 * self.taps if self.transport == "fp8" else 0
        return self.columns * self._stored.itemsize + self.last_columns * self.dtype.itemsize + scales

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.num_buffers * self.max_tokens * self.token_bytes

    def view(self, buffer: int, tokens: int) -> Tensor:
        """The first ``tokens`` rows of a buffer as they are stored, [tokens, columns]."""
        return self.storage[buffer, : tokens * self.columns].view(tokens, self.columns)

    def last_view(self, buffer: int, tokens: int) -> Tensor | None:
        """The target's last states in a buffer, [tokens, last columns]; None where they do not travel."""
        if not self.last_columns:
            return None
        return self.last[buffer, : tokens * self.last_columns].view(tokens, self.last_columns)

    def place(self, buffer: int, tokens: int) -> Tensor | None:
        """Where features are written straight away; None where `write` must convert them."""
        return self.view(buffer, tokens) if self._stored == self.dtype else None

    def write(self, buffer: int, features: Tensor) -> None:
        """Features [S, N·H] into a buffer, converted; nothing to do for those that were written into `place`."""
        tokens = len(features)
        if self._stored == self.dtype:
            return
        if self.transport != "fp8":
            self.view(buffer, tokens).copy_(features)
            return
        by_tap = features.view(tokens, self.taps, -1).float()
        scales = by_tap.abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny) / torch.finfo(_FP8).max
        self.view(buffer, tokens).copy_((by_tap / scales[..., None]).to(_FP8).view(tokens, self.columns))
        self._scales(buffer, tokens).copy_(scales)

    def read(self, buffer: int, tokens: int) -> Tensor:
        """The features of a buffer, [S, N·H], in their own type: the buffer itself where nothing was converted."""
        stored = self.view(buffer, tokens)
        if self.transport != "fp8":
            return stored.to(self.dtype)
        by_tap = stored.float().view(tokens, self.taps, -1) * self._scales(buffer, tokens)[..., None]
        return by_tap.view(tokens, self.columns).to(self.dtype)

    def error(self, buffer: int, features: Tensor) -> float:
        """Relative RMS error of features that were written into a buffer."""
        exact = features.float().cpu()
        lost = self.read(buffer, len(features)).float() - exact
        return float(lost.norm() / exact.norm().clamp_min(torch.finfo(torch.float32).tiny))

    def pin(self, device: str | torch.device) -> None:
        """Page-locks the buffers in this process for copies of a card, which then run beside its computation.

        Raises:
            StageError: the driver refuses.
        """
        for shared in (self.storage, self.last, self.scales):
            page_lock(shared, device)

    def _scales(self, buffer: int, tokens: int) -> Tensor:
        return self.scales[buffer, : tokens * self.taps].view(tokens, self.taps)

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
