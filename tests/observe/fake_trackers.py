"""Trackers for tests, started in a tracker's process: what they see goes to the file ``seen`` of the run directory."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any


class Recording:
    """Writes one row a call; ``mode`` in the header says what goes wrong."""

    def __init__(self, context: Any) -> None:
        self._mode = context.header.get("mode", "")
        self._file = (Path(context.run_dir) / "seen").open("a", buffering=1)
        self._see("start", pid=os.getpid())
        if self._mode == "refuses":
            raise ConnectionRefusedError("no route\nand more")
        if self._mode == "hangs at the start":
            signal.pause()

    def _see(self, what: str, **more: Any) -> None:
        self._file.write(json.dumps({"what": what, **more}) + "\n")

    def write(self, line: Any) -> None:
        print("noise that a package makes")
        self._see("line", step=line.step, event=getattr(line, "event", None))
        if self._mode == "hangs":
            signal.pause()
        if self._mode == "fails" and line.step == 3:
            raise BrokenPipeError("backend is gone")

    def close(self, status: str) -> None:
        self._see("close", status=status)
        if self._mode == "fails when it closes":
            raise SystemExit("server said no")


def start(context: Any) -> Recording:
    return Recording(context)
