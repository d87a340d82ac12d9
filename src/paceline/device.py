"""The device that a process works on: named once, before anything else touches CUDA, and never guessed afterwards.

CUDA acts on a "current" card wherever none is named, and that is card 0 until somebody says otherwise: copies are then
waited for on the wrong card, memory is read from it, and every process opens a context there (about half a gibibyte).
So each process calls `own_device` first, and this module alone touches `torch.cuda`, with a device in every call.

Names are those of the settings: ``cpu``, ``cuda:3``, ``cuda:0+cuda:1`` for a worker that is spread over several cards.
The first of them is where ids go in and features come out.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config import devices_of
from paceline.errors import PacelineError, StageError

Name = str | torch.device


def main_device(name: Name) -> torch.device:
    """The first device of a name, with its number: ``cuda`` is ``cuda:0``."""
    device = torch.device(devices_of(str(name))[0])
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def own_device(name: Name) -> torch.device:
    """Makes a device this process's own; the first thing that a process does, before anything else touches CUDA.

    Returns:
        The device (of several, the first).
    """
    device = main_device(name)
    if device.type == "cuda":
        # Shapes differ from batch to batch; without this the free memory breaks up into pieces that fit none of them.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
    return device


@contextmanager
def deterministic_algorithms(wanted: bool) -> Generator[None]:
    """Work inside gives the same bits each time on the same device, or raises; nothing changes where it is not wanted.

    For a process that has not computed on a card yet: cuBLAS reads its part once. NCCL is held to one algorithm; it
    chooses by size and machine otherwise.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    known = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(known[0], warn_only=known[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


@contextmanager
def device_errors(kind: type[PacelineError], out_of_memory: Callable[[], str]) -> Generator[None]:
    """What a device cannot do inside, as one line.

    Args:
        kind: what is raised.
        out_of_memory: the line where memory does not suffice.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise kind(out_of_memory()) from error
    except RuntimeError as error:
        operation, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise kind(
            f"train.deterministic: {operation} always gives the same bits on no GPU; set train.deterministic to false"
        ) from error


def why_missing(name: str) -> str | None:
    """Why this machine cannot run on a device, and what there is; None where it can. Opens no context.

    Args:
        name: one device, without ``+``.
    """
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (kind == "cpu" and number) or (number and not number.isdecimal()):
        return f"{name}: not a device of paceline; use cpu, or cuda:0, cuda:1, ... for NVIDIA and AMD GPUs"
    if kind == "cpu":
        return None
    count = num_cards()
    if count == 0:
        why = "this torch was built without it" if not torch.backends.cuda.is_built() else "torch finds no GPU"
        return f"{name}: this machine has no CUDA device ({why}); use cpu"
    if int(number or 0) >= count:
        return f"{name}: this machine has {count} CUDA device{'s' * (count > 1)}, cuda:0 to cuda:{count - 1}"
    return None


def num_cards() -> int:
    """CUDA devices of this machine."""
    return torch.cuda.device_count()


def cards_of(name: Name) -> list[torch.device]:
    """The CUDA devices among those of a name."""
    return [device for part in devices_of(str(name)) if (device := main_device(part)).type == "cuda"]


def peak_allocated_bytes(name: Name) -> int:
    """Most bytes that this process's allocator has held on the cards of a name; 0 on a CPU."""
    if not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.max_memory_allocated(card) for card in cards_of(name))


def peak_resident_bytes() -> int:
    """Most memory of the host that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def total_bytes(name: Name) -> int:
    """Memory of a device: of the card, or of the machine."""
    device = main_device(name)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allocated_bytes(name: Name) -> int:
    """Bytes that this process's tensors take on the first card of a name; 0 on a CPU."""
    device = main_device(name)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" and torch.cuda.is_initialized() else 0


def synchronize(name: Name) -> None:
    """Waits until the cards of a name have done all that they were asked."""
    for card in cards_of(name):
        torch.cuda.synchronize(card)


class Mark:
    """A point in the work that was queued on a device; on a CPU, where nothing is queued, a point in time.

    Args:
        name: the device.
        stream: whose work counts; the current one of the device where None.
        timed: whether `seconds_since` will be asked.
    """

    def __init__(self, name: Name, stream: torch.cuda.Stream | None = None, *, timed: bool = False) -> None:
        device = main_device(name)
        self._at_s = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=timed)
            self.event.record(stream or torch.cuda.current_stream(device))

    def reached(self) -> bool:
        """Whether the device has come to this point; never waits."""
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """The host waits until the device has come to this point."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Time of the device between two marks that were both made with ``timed`` and are both reached."""
        if self.event is None or earlier.event is None:
            return self._at_s - earlier._at_s
        return earlier.event.elapsed_time(self.event) / 1e3


def to_device(values: np.ndarray, name: Name) -> Tensor:
    """Values of the host on a device; the host does not wait for what is queued there."""
    tensor, device = torch.from_numpy(np.ascontiguousarray(values)), main_device(name)
    if device.type == "cuda":
        # From memory that is not page-locked the copy would wait for everything before it.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def side_stream(name: Name) -> torch.cuda.Stream | None:
    """A queue for copies that run beside what the device computes; None on a CPU."""
    device = main_device(name)
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Work inside is queued on the stream; None changes nothing."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def stream_waits(stream: torch.cuda.Stream | None, mark: Mark) -> None:
    """What is queued on a stream from now on begins after the mark."""
    if stream is not None and mark.event is not None:
        stream.wait_event(mark.event)


def compute_waits(name: Name, mark: Mark) -> None:
    """What the device computes from now on begins after the mark."""
    device = main_device(name)
    if device.type == "cuda":
        stream_waits(torch.cuda.current_stream(device), mark)


def used_by_compute(tensor: Tensor, name: Name) -> None:
    """Tells the allocator that a tensor of another stream is used by the device's own, so its memory is not reused."""
    device = main_device(name)
    if device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(device))


def page_lock(tensor: Tensor, name: Name) -> None:
    """Page-locks the memory of a tensor of the host for a card's copies; not run on a GPU yet.

    Raises:
        StageError: the driver refuses.
    """
    device = main_device(name)
    if device.type != "cuda" or not tensor.numel():
        return
    with torch.cuda.device(device):  # the call opens a context on the current card
        runtime: Any = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if code:
        raise StageError(f"{device}: CUDA cannot page-lock {tensor.nbytes} bytes of host memory (error {code})")


def page_unlock(tensor: Tensor, name: Name) -> None:
    """Undoes `page_lock` before the memory is given back; not run on a GPU yet."""
    device = main_device(name)
    if device.type == "cuda" and tensor.numel():
        with torch.cuda.device(device):
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(tensor.data_ptr())


@contextmanager
def no_waiting(name: Name) -> Generator[None]:
    """Work inside raises where the host would wait for a card; on a CPU nothing is watched.

    Raises:
        RuntimeError: an operation inside waits.
    """
    if main_device(name).type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def hold_back(name: Name, cycles: int = 200_000_000) -> None:
    """Keeps a card's own stream busy for about a tenth of a second, so that a copy that is not waited for shows."""
    device = main_device(name)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(cycles)


def description(name: Name) -> str:
    """Name of a card and its memory; of a CPU, its number of threads."""
    device = main_device(name)
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} threads"
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"


def forget_peak(name: Name) -> None:
    """Begins `peak_allocated_bytes` anew."""
    for card in cards_of(name):
        torch.cuda.reset_peak_memory_stats(card)
