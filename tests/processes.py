"""Processes and ports, as the system lists them."""

from __future__ import annotations

import socket
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """All processes below one, each before its own children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry.name), *children_of(int(entry.name))]
    return found


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
