"""CUDA as `paceline.device` sees it, played on the CPU: copies lag behind until somebody waits for the right card.

Tensors "on a card" are CPU tensors whose memory is noted as that card's. What is queued with `non_blocking=True` is
done when an event behind it, its stream or its card is waited for, and not before; whoever reads too early sees the old
bytes, as on a real card. Computation is not delayed. Threads other than the one inside `fake_cuda` see plain memory.

    with fake_cuda(monkeypatch, cards=4) as cuda:
        learner = make_learner(spec, device="cuda:3")

A copy that is queued behind the computation (on the card's own stream) takes the values of now. Others, on a stream
beside it or from page-locked memory of the host, read their source when they are done, so that memory that is used
again too early shows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
COPIES = {
    *(aten.copy_, aten._to_copy, aten.clone, aten.view, aten.slice, aten.select, aten.detach, aten.alias),
    *(aten.unsqueeze, aten.as_strided, aten._unsafe_view, aten.set_),
}
"""Operations that read no values, or give them on unchanged."""


class FakeStream:
    """A queue of copies of one card."""

    def __init__(self, cuda: FakeCuda, device: Any) -> None:
        self.cuda, self.device = cuda, cuda.numbered(device)
        self.queue: list[Callable[[], None]] = []
        self.done = 0
        self.waited_for: list[FakeStream | None] = []
        cuda.streams.append(self)

    def run_to(self, count: int) -> None:
        """Do what was queued up to a place."""
        while self.done < count:
            self.queue[self.done]()
            self.done += 1

    def synchronize(self) -> None:
        self.run_to(len(self.queue))

    def wait_event(self, event: FakeEvent) -> None:
        """What follows on this stream sees what came before the event: nothing here is delayed but copies."""
        self.waited_for.append(event.stream)
        event.synchronize()

    def wait_stream(self, stream: FakeStream) -> None:
        stream.synchronize()


class FakeEvent:
    """A place in a queue."""

    def __init__(self, **_: Any) -> None:
        self.stream: FakeStream | None = None
        self.place = 0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.place = stream, len(stream.queue)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_to(self.place)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.place

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1.0


class FakeCuda(TorchDispatchMode):
    """The cards of a machine.

    Attributes:
        current: number of the current card.
        contexts: cards on which anything was done.
        locked: page-locked ranges of memory, (begin, end).
        copies: copies that were queued.
        only_copies: whether page-locked memory may be viewed and copied alone: no pass of the host over it.
    """

    def __init__(self, cards: int) -> None:
        super().__init__()
        self.cards, self.current = cards, 0
        self.contexts: set[int] = set()
        self.locked: dict[int, int] = {}
        self.streams: list[FakeStream] = []
        self.copies = 0
        self.only_copies = False
        self._cards_of_memory: dict[int, int] = {}
        self._defaults = {number: FakeStream(self, number) for number in range(cards)}
        self._chosen = dict(self._defaults)

    def numbered(self, device: Any) -> torch.device:
        number = device if isinstance(device, int) else torch.device(device).index
        return torch.device("cuda", self.current if number is None else number)

    def touch(self, device: Any) -> int:
        """The number of a card, which now has a context."""
        index = self.numbered(device).index
        assert index < self.cards, f"no card {index}"
        self.contexts.add(index)
        return index

    def current_stream(self, device: Any) -> FakeStream:
        return self._chosen[self.touch(device)]

    @contextmanager
    def on(self, stream: FakeStream) -> Generator[None]:
        index = self.touch(stream.device)
        before, self._chosen[index] = self._chosen[index], stream
        card, self.current = self.current, index
        try:
            yield
        finally:
            self._chosen[index], self.current = before, card

    @contextmanager
    def device(self, device: Any) -> Generator[None]:
        before, self.current = self.current, self.touch(device)
        try:
            yield
        finally:
            self.current = before

    def set_device(self, device: Any) -> None:
        self.current = self.touch(device)

    def synchronize(self, device: Any) -> None:
        index = self.touch(device)
        for stream in self.streams:
            if stream.device.index == index:
                stream.synchronize()

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.contexts.add(self.current)
        self.locked[pointer] = pointer + size
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.locked[pointer]
        return 0

    def is_locked(self, tensor: Tensor) -> bool:
        return any(begin <= tensor.data_ptr() < end for begin, end in self.locked.items())

    def on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in the host's memory."""
        return tensor.untyped_storage().data_ptr() not in self._cards_of_memory

    def card_of(self, tensor: Tensor) -> int:
        """The card that holds a tensor; the current one where its memory is not known."""
        return self._cards_of_memory.get(tensor.untyped_storage().data_ptr(), self.current)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, card = dict(kwargs or {}), None
        to_host = kwargs.get("device") == torch.device("cpu")
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            card = self.touch(kwargs["device"])
            kwargs["device"] = torch.device("cpu")
        if self.only_copies and func.overloadpacket not in COPIES:
            large = [value for value in args if isinstance(value, Tensor) and value.numel() > 64]
            assert not any(map(self.is_locked, large)), f"{func} passes over page-locked memory of the host"
        if func is aten.copy_.default and (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
            return self._later(args[0], args[1])
        if func is aten._to_copy.default and kwargs.pop("non_blocking", False) and self.is_locked(args[0]):
            # What is there before the copy is made.
            output = self._later(torch.full_like(args[0], 77, dtype=kwargs.get("dtype", args[0].dtype)), args[0])
        else:
            output = func(*args, **kwargs)
        if func is not aten.copy_.default:  # what is written into stays where it is
            self._note(card, () if to_host else args, output)
        return output

    def _note(self, card: int | None, args: Any, output: Any) -> None:
        """What is made on a card, or of something on a card, is on that card."""
        for value in args:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if card is None and isinstance(tensor, Tensor):
                    card = self._cards_of_memory.get(tensor.untyped_storage().data_ptr())
        for tensor in output if isinstance(output, (list, tuple)) else (output,):
            if card is not None and isinstance(tensor, Tensor):
                self._cards_of_memory[tensor.untyped_storage().data_ptr()] = card
            elif isinstance(tensor, Tensor):
                self._cards_of_memory.pop(tensor.untyped_storage().data_ptr(), None)

    def _later(self, target: Tensor, source: Tensor) -> Tensor:
        self.copies += 1
        from_host = self.is_locked(source)
        card = self.touch(self.current if from_host else self.card_of(source))
        late = from_host or self._chosen[card] is not self._defaults[card]
        target, source = target.detach(), source.detach() if late else source.detach().clone()
        self._chosen[card].queue.append(lambda: target.copy_(source))
        return target


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch, cards: int = 4) -> Generator[FakeCuda]:
    """A machine with so many cards; see the module."""
    cuda = FakeCuda(cards)
    played: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: bool(cuda.contexts),
        "device_count": lambda: cards,
        "set_device": cuda.set_device,
        "current_device": lambda: cuda.current,
        "device": cuda.device,
        "Event": FakeEvent,
        "Stream": lambda device: FakeStream(cuda, device),
        "current_stream": cuda.current_stream,
        "stream": cuda.on,
        "synchronize": cuda.synchronize,
        "cudart": lambda: cuda,
        "max_memory_allocated": lambda device: cuda.touch(device) * 0 + 1,
        "mem_get_info": lambda device: (cuda.touch(device) * 0 + 2**33, 2**34),
    }
    for name, value in played.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)  # small inputs, whose copies are not delayed
    with cuda:
        yield cuda
