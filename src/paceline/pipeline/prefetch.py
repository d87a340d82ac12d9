"""Prefetch: makes items ahead on one thread, bounded in number and bytes; closable; wakes a waiter through a pipe."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from typing import Generic, Literal, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Runs an iterator on a thread, at most ``ahead`` items in advance.

    `wakeup` becomes readable when there is something new, so that an event loop can wait for this and for its workers
    at once. An exception of the iterator is raised by `take`.

    Args:
        items: what to run; made use of on the thread only.
        ahead: items that may wait.
        ahead_bytes: bytes that may wait, beyond which no further item is made; one item may be larger.
        size_of: bytes of an item.
    """

    def __init__(
        self,
        items: Iterator[Item],
        ahead: int,
        ahead_bytes: int | None = None,
        size_of: Callable[[Item], int] = lambda item: 0,
    ) -> None:
        self._items, self._ahead, self._ahead_bytes, self._size_of = items, ahead, ahead_bytes, size_of
        self._waiting_bytes = 0
        self._queue: deque[tuple[Item, float, float]] = deque()
        self._spent = {"busy": 0.0, "blocked": 0.0}
        self._state: Literal["busy", "blocked"] = "busy"
        self._since = time.perf_counter()
        self.made_s = (0.0, 0.0)
        """When the making of the item taken last began and ended, of ``time.time()``."""
        self._error: BaseException | None = None
        self._closed = False
        self._finished = False
        self._changed = threading.Condition()
        self.wakeup, self._bell = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name="paceline feed", daemon=True)
        self._thread.start()

    def take(self) -> Item | None:
        """The next item, or None when none is ready yet (or none is left: see `finished`)."""
        while self.wakeup.poll():
            self.wakeup.recv_bytes()
        with self._changed:
            if self._queue:
                item, *made = self._queue.popleft()
                self.made_s = (made[0], made[1])
                self._waiting_bytes -= self._size_of(item)
                self._changed.notify()
                return item
            if self._error is not None:
                raise self._error
            return None

    @property
    def finished(self) -> bool:
        """Whether the iterator has ended and everything was taken."""
        with self._changed:
            return self._finished and not self._queue and self._error is None

    @property
    def waiting(self) -> list[Item]:
        """Items that are made and not yet taken."""
        with self._changed:
            return [item for item, *_ in self._queue]

    def spent(self) -> dict[str, float]:
        """Seconds since the last call that the thread was ``busy`` making items and ``blocked`` for want of room."""
        with self._changed:
            if self._thread.is_alive():
                self._turn(self._state)
            spent, self._spent = self._spent, {"busy": 0.0, "blocked": 0.0}
            return spent

    def close(self) -> None:
        """Stop the thread; items that wait are dropped. A thread that is stuck in its iterator is left to die alone."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._bell.close()
            self.wakeup.close()

    def _turn(self, state: Literal["busy", "blocked"]) -> None:
        """Account the time so far to the state that ends."""
        now = time.perf_counter()
        self._spent[self._state] += now - self._since
        self._state, self._since = state, now

    def _full(self, size: int) -> bool:
        if self._ahead_bytes is not None and self._queue and self._waiting_bytes + size > self._ahead_bytes:
            return True
        return len(self._queue) >= self._ahead

    def _run(self) -> None:
        try:
            began_s = time.time()
            for item in self._items:
                ended_s = time.time()
                with self._changed:
                    self._turn("blocked")
                    while self._full(self._size_of(item)) and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    self._queue.append((item, began_s, ended_s))
                    self._waiting_bytes += self._size_of(item)
                    self._turn("busy")
                self._bell.send_bytes(b"1")
                began_s = time.time()
        except BaseException as error:  # noqa: BLE001 - handed to the reader, which raises it
            with self._changed:
                self._error = error
        with self._changed:
            self._finished = True
        self._bell.send_bytes(b"1")
