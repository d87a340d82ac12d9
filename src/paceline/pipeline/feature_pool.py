"""The reusable tensor pool: shared buffers through which features cross processes; only a buffer's number travels.

Shape letters: S tokens of a micro-batch, N taps, H hidden size.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from paceline.device import Mark, page_lock
from paceline.errors import StageError

SHARED_MEMORY = Path("/dev/shm")

Transport = Literal["exact", "bf16", "fp8"]
"""How features cross: as the target made them; as bfloat16; as float8 with a scale for each token and tap."""

_FP8 = torch.float8_e4m3fn
CONVERTED_AT_ONCE = 4096
"""Tokens that are converted at once: in float32 a whole batch would need gigabytes."""


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
        taps: of `columns`, which have their own scales in fp8.

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
        check_room(
            self.num_bytes,
            f"{num_buffers} feature buffers need",
            "lower plan.token_budget or flow.pool_buffers, or give the container more (docker: --shm-size)",
        )
        self.storage = _shared(num_buffers, max_tokens * columns, self._stored)
        self.last = _shared(num_buffers, max_tokens * last_columns, dtype)
        self.scales = _shared(num_buffers, max_tokens * taps if transport == "fp8" else 0, torch.float32)

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
        """Where features of the host are written straight away; None where `write` must convert them."""
        return self.view(buffer, tokens) if self._stored == self.dtype else None

    def write(self, buffer: int, features: Tensor, last: Tensor | None = None) -> None:
        """Features [S, N·H], and the last states [S, H], into a buffer; converted where they are.

        From a GPU the copies are queued on the current stream, and the buffer holds the features once they are done.
        Features that were written into `place` are left there.
        """
        tokens = len(features)
        view = self.view(buffer, tokens)
        if self.transport == "fp8":
            stored, scales = _to_fp8(features, self.taps)
            self._scales(buffer, tokens).copy_(scales, non_blocking=True)
        else:
            stored = features.to(self._stored)
        if stored.data_ptr() != view.data_ptr():
            view.copy_(stored, non_blocking=True)
        last_view = self.last_view(buffer, tokens)
        if last_view is not None and last is not None:
            last_view.copy_(last, non_blocking=True)

    def room_on(self, device: torch.device) -> DeviceRoom:
        """Memory of a card for the largest batch, as it is stored; used again and again, it never becomes fragments."""
        features = torch.empty(self.storage.shape[1], dtype=self._stored, device=device)
        return DeviceRoom(device, features, torch.empty(self.last.shape[1], dtype=self.dtype, device=device))

    def read(self, buffer: int, tokens: int, room: DeviceRoom | None = None) -> tuple[Tensor, Tensor | None]:
        """Features [S, N·H] and last states [S, H] of a buffer, in their own type.

        Args:
            buffer: its number.
            tokens: real tokens that it holds.
            room: of a card, where they are copied to, and converted; that is queued on the current stream. None: they
                are wanted on the host, where nothing is copied that need not be converted.
        """
        stored, last = self.view(buffer, tokens), self.last_view(buffer, tokens)
        if room is not None:
            stored = room.features[: stored.numel()].view(stored.shape).copy_(stored, non_blocking=True)
            if last is not None:
                last = room.last[: last.numel()].view(last.shape).copy_(last, non_blocking=True)
        if self.transport != "fp8":
            return stored.to(self.dtype), last
        scales = self._scales(buffer, tokens)
        if room is not None:
            scales = scales.to(room.device, non_blocking=True)
        return _from_fp8(stored, scales, self.dtype), last

    def transport_error(self, features: Tensor) -> float:
        """Relative RMS error that features get on their way, found where they are."""
        if self._stored == self.dtype:
            return 0.0
        lost = torch.zeros((), dtype=torch.float64, device=features.device)
        size = torch.zeros_like(lost)
        for part in features.split(CONVERTED_AT_ONCE):
            there = (
                part.to(self._stored) if self.transport != "fp8" else _from_fp8(*_to_fp8(part, self.taps), self.dtype)
            )
            lost += (there.float() - part.float()).square().sum(dtype=torch.float64)
            size += part.float().square().sum(dtype=torch.float64)
        return float((lost / size.clamp_min(torch.finfo(torch.float64).tiny)).sqrt())

    def pin(self, device: str | torch.device) -> None:
        """Page-locks the buffers in this process for copies of a card, which then run beside its computation.

        Raises:
            StageError: the driver refuses.
        """
        for shared in (self.storage, self.last, self.scales):
            page_lock(shared, device)

    def _scales(self, buffer: int, tokens: int) -> Tensor:
        return self.scales[buffer, : tokens * self.taps].view(tokens, self.taps)


def check_room(num_bytes: int, what: str, advice: str) -> None:
    """Refuse what the machine's shared memory has no room for.

    Args:
        num_bytes: needed.
        what: that needs them, with its verb.
        advice: what the user can do.

    Raises:
        StageError: one line.
    """
    if not SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < num_bytes:
        raise StageError(
            f"shared memory: {what} {num_bytes / 2**20:.0f} MiB, "
            f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free; {advice}"
        )


@dataclass
class DeviceRoom:
    """Memory of a card for one batch.

    Attributes:
        device: the card.
        features, last: flat.
        free: when what was computed with it is done; None before the first use.
    """

    device: torch.device
    features: Tensor
    last: Tensor
    free: Mark | None = None


def _shared(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Zeros in shared memory; a page belongs to the memory bank of whichever process touches it first."""
    if not rows * columns:
        return torch.zeros((rows, columns), dtype=dtype)
    storage = torch.UntypedStorage._new_shared(rows * columns * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage).view(rows, columns)


def _to_fp8(features: Tensor, taps: int) -> tuple[Tensor, Tensor]:
    """Features [S, N·H] as float8, and the scale of each token and tap, float32 [S, N]."""
    stored = torch.empty_like(features, dtype=_FP8)
    scales = torch.empty((len(features), taps), dtype=torch.float32, device=features.device)
    for first in range(0, len(features), CONVERTED_AT_ONCE):
        part = slice(first, first + CONVERTED_AT_ONCE)
        by_tap = features[part].unflatten(1, (taps, -1)).float()
        scale = by_tap.abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny) / torch.finfo(_FP8).max
        stored[part] = (by_tap / scale[..., None]).to(_FP8).flatten(1)
        scales[part] = scale
    return stored, scales


def _from_fp8(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The features again, [S, N·H]."""
    features = torch.empty_like(stored, dtype=dtype)
    for first in range(0, len(stored), CONVERTED_AT_ONCE):
        part = slice(first, first + CONVERTED_AT_ONCE)
        by_tap = stored[part].float().unflatten(1, (scales.shape[1], -1)) * scales[part, :, None]
        features[part] = by_tap.flatten(1).to(dtype)
    return features
