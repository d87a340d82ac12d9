"""Memory that a target worker and its engine share: a state for each document of a batch, then the documents' states.

It is a file without a name (memfd) of the target worker, which its engine opens by way of ``/proc``: nothing is left
when both are gone, however they end.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

PLACES = 65_536
"""int64 numbers before the states: the engine's steps so far, then one a document."""
HEADER_BYTES = 8 * PLACES


class SharedStates:
    """A view of the memory.

    ``progress`` counts the engine's steps. ``marks[n]`` is the ticket of document n once its states are there, and
    minus the ticket where its request was aborted.

    Args:
        path: of the file, mapped anew when it has grown.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._map()

    def _map(self) -> None:
        file = os.open(self._path, os.O_RDWR)
        try:
            self._mapped = mmap.mmap(file, os.fstat(file).st_size)
        finally:
            os.close(file)
        self.bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)
        numbers = self.bytes[:HEADER_BYTES].view(torch.int64)
        self.progress, self.marks = numbers[:1], numbers[1:]

    def states(self, first_number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Numbers from `first_number` on, as a tensor of this shape."""
        count = torch.Size(shape).numel()
        start = HEADER_BYTES + first_number * dtype.itemsize
        if start + count * dtype.itemsize > len(self.bytes):
            self._map()
        return self.bytes[start : start + count * dtype.itemsize].view(dtype).view(shape)


def shared_files(session: int) -> set[Path]:
    """Files in shared memory that processes have mapped whose session is led by the process of this number."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) != session:
                continue
            lines = (folder / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # has ended, or is of another user
            continue
        found |= {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line and "(deleted)" not in line}
    return found
