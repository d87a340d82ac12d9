"""The prefetch thread: bounded, closable, and honest about errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from paceline.pipeline.prefetch import Prefetcher


def drain(prefetcher: Prefetcher[int]) -> list[int]:
    taken: list[int] = []
    while not prefetcher.finished:
        item = prefetcher.take()
        if item is None:
            prefetcher.wakeup.poll(5.0)
        else:
            taken.append(item)
    return taken


def test_gives_all_items_in_order() -> None:
    prefetcher = Prefetcher(iter(range(100)), 3)
    assert drain(prefetcher) == list(range(100))
    prefetcher.close()


def test_stays_within_its_bound() -> None:
    made: list[int] = []
    enough = threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 3:
                enough.set()
            yield number

    prefetcher = Prefetcher(items(), 3)
    assert enough.wait(5.0)
    assert len(made) <= 4
    prefetcher.close()
    assert len(made) <= 5


def test_stays_within_its_bytes_but_for_one_item() -> None:
    prefetcher = Prefetcher(iter([3, 3, 3, 9, 1, 1]), 10, ahead_bytes=7, size_of=lambda size: size)
    taken: list[int] = []
    for expected in ([3, 3], [3, 3], [3], [9], [1, 1], [1]):
        deadline = threading.Event()
        for _ in range(500):
            if prefetcher.waiting == expected:
                break
            deadline.wait(0.01)
        assert prefetcher.waiting == expected
        item = prefetcher.take()
        assert item is not None
        taken.append(item)
    assert taken == [3, 3, 3, 9, 1, 1]
    prefetcher.close()


def test_an_iterators_error_comes_after_its_items() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("row 2")

    prefetcher = Prefetcher(items(), 3)
    with pytest.raises(ValueError, match="row 2"):
        drain(prefetcher)
    prefetcher.close()


def test_closes_while_the_thread_waits_for_room() -> None:
    prefetcher = Prefetcher(iter(range(100)), 1)
    prefetcher.wakeup.poll(5.0)
    prefetcher.close()
    assert not prefetcher._thread.is_alive()
