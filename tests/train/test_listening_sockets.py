"""What every kind of run listens on: nothing on one machine but loopback, and there only among drafter ranks."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from paceline.checkpoint import checkpoints
from processes import children_of

MakeRun = Callable[..., Path]
LISTEN = "0A"
RANKS = {"mode": "pipeline", "drafter_devices": ["cpu", "cpu"]}


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    try:
        links = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Address and port of everything that these processes listen on: TCP, and UDP that is bound to a port."""
    mine = set().union(*map(sockets_of, pids))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            place, state, inode = fields[1], fields[3], fields[9]
            if inode in mine and (state == LISTEN or (table.startswith("udp") and fields[2].endswith(":0000"))):
                digits, port = place.split(":")
                found.add((address_of(digits), int(port, 16)))
    return found


def address_of(digits: str) -> str:
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def start(settings: Path, log: Path, **variables: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with log.open("w") as file:
        command = [sys.executable, "-m", "paceline", "train", str(settings)]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def seen_until_trained(machines: list[subprocess.Popen], settings: Path, logs: list[Path]) -> list[set]:
    """What each machine's processes listened on, up to its first checkpoints."""
    run_dir = Path(yaml.safe_load(settings.read_text())["run_dir"])
    seen: list[set] = [set() for _ in machines]
    deadline = time.monotonic() + 240
    while checkpoints.newest_step(run_dir) < 4:
        assert time.monotonic() < deadline, [log.read_text() for log in logs]
        assert all(machine.poll() is None for machine in machines), [log.read_text() for log in logs]
        for machine, found in zip(machines, seen, strict=True):
            found |= listening([machine.pid, *children_of(machine.pid)])
        time.sleep(0.02)
    machines[-1].send_signal(signal.SIGTERM)
    assert [machine.wait(60) for machine in machines] == [0] * len(machines), [log.read_text() for log in logs]
    return seen


def long_run(make_run: MakeRun, flow: dict, store: Path) -> Path:
    return make_run(
        flow=flow,
        plan={"accumulate": 1},
        train={"max_steps": 4000, "epochs": 2000},
        checkpoint={"every_steps": 2},
        evaluate={"device": "cpu", "num_prompts": 1, "max_new_tokens": 2},
        data={"heldout_share": 0.2, "store": str(store)},
    )


@pytest.mark.parametrize(
    ("flow", "ports"),
    [
        ({"mode": "inline"}, 0),
        pytest.param({"mode": "pipeline"}, 0, marks=pytest.mark.slow),
        pytest.param(RANKS, 2, marks=pytest.mark.slow),
    ],
)
def test_one_machine_listens_on_loopback_at_most(flow: dict, ports: int, make_run: MakeRun, tmp_path: Path) -> None:
    settings, log = long_run(make_run, flow, tmp_path / "store"), tmp_path / "log"
    [seen] = seen_until_trained([start(settings, log)], settings, [log])
    assert len(seen) == ports, seen
    assert {address for address, _ in seen} <= {"127.0.0.1"}, seen


@pytest.mark.slow
def test_machines_listen_on_the_address_of_the_master_alone(make_run: MakeRun, tmp_path: Path) -> None:
    """127.0.0.2 stands for the network of the machines: 127.0.0.1 and all other addresses must stay closed."""
    settings = long_run(make_run, RANKS, tmp_path / "store")
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port)}
    logs = [tmp_path / f"machine{number}.log" for number in range(2)]
    machines = [start(settings, logs[number], RANK=str(number), **place) for number in range(2)]
    first, second = seen_until_trained(machines, settings, logs)
    assert ("127.0.0.2", port) in first and ("127.0.0.2", port) not in second
    assert all(ipaddress.ip_address(address).is_loopback for address, _ in first | second), (first, second)
