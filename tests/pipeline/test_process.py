"""How the end of a worker is named."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.pipeline.messages import Ready
from paceline.pipeline.process import Stage, WorkerProcess


class Reader(Stage):
    """Maps a file, and reads its last byte when asked."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as stream:
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def handle(self, message: Any) -> Iterator[Any]:
        yield self._bytes[-1]


def test_a_file_that_is_cut_under_a_worker_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(100_000))
    worker = WorkerProcess("target 0 (cpu)", Reader, (path,))
    assert worker.connection.poll(60) and isinstance(worker.connection.recv().payload, Ready)
    worker.ready = True
    worker.send("read")
    assert worker.connection.recv().payload == 0
    path.write_bytes(b"")
    worker.send("read")
    worker.process.join(30)
    assert worker.death() == f"was killed by SIGBUS: {path} was cut under it; put the file back; it ended"
    worker.stop(0.0)
