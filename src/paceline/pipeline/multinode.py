"""Several machines, one pipeline each: who they are, what they must agree on, and that none of them is left waiting.

Each machine runs one `paceline train`, started by torchrun or with the same variables set by hand. The parents join
through torch's store at MASTER_ADDR:MASTER_PORT. Machine 0 listens, the others connect to it, and every connection is
watched by a thread: a machine that dies closes its connection, one that is cut off sends no more signs of life. Only
what is named here crosses these connections; gradients and counters cross the group of the drafter ranks.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, TypeVar

from paceline.errors import ConfigError, StageError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SIGN_EVERY_S = 1.0
"""Seconds between two signs of life."""
SILENCE_LIMIT_S = 20.0
"""A machine without a sign of life for this long counts as gone."""
LEAVE_LIMIT_S = 30.0
"""Machine 0 waits this long at the end for the others to leave."""
MAX_STEPS_AHEAD = 2
"""Steps that a machine's hub may be ahead of the last one that all machines have taken."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class RankInfo:
    """Where a drafter rank finds the others; pickles.

    Attributes:
        address, port: of the store at which they meet.
        prefix: of their entries in it.
        rank, size: which rank, of how many.
        across_machines: whether some of them are elsewhere.
    """

    address: str
    port: int
    prefix: str
    rank: int
    size: int
    across_machines: bool

    def join(self, device: str) -> Any:
        """Meets the other ranks; the torch.distributed group of all of them."""
        import torch.distributed as dist

        from paceline.device import own_device

        store = dist.TCPStore(self.address, self.port, is_master=False)
        on_gpu = own_device(device).type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(self.prefix, store),
            rank=self.rank,
            world_size=self.size,
        )
        return dist.group.WORLD


@dataclass(frozen=True)
class NodeInfo:
    """One machine's place among several.

    Attributes:
        number, count: which machine, of how many.
        address, port: of the store at which they meet; on machine 0.
        hosted: whether the launcher keeps that store, or machine 0 must.
        attempt: restarts by the launcher, which keep what they leave in the store apart.
        on_this_host: how many of them are on this host.
    """

    number: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    hosted: bool = False
    attempt: str = "0"
    on_this_host: int = 1


def node_info_of(environment: Mapping[str, str]) -> NodeInfo:
    """This machine's place, from the variables that torchrun sets; alone where they are not set.

    Raises:
        ConfigError: only some are set, or they contradict one another.
    """
    given = [name for name in VARIABLES if name in environment]
    if "WORLD_SIZE" not in given or environment["WORLD_SIZE"] == "1":
        return NodeInfo()
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise ConfigError(f"environment: WORLD_SIZE is set but {', '.join(missing)} not; start with torchrun, or unset")
    values: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not environment[name].isdigit():
            raise ConfigError(f"environment: {name}={environment[name]} is no whole number; start with torchrun")
        values[name] = int(environment[name])
    if not 0 <= values["RANK"] < values["WORLD_SIZE"]:
        raise ConfigError(f"environment: RANK {values['RANK']} is not one of WORLD_SIZE {values['WORLD_SIZE']}")
    return NodeInfo(
        values["RANK"],
        values["WORLD_SIZE"],
        environment["MASTER_ADDR"],
        values["MASTER_PORT"],
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        int(environment.get("LOCAL_WORLD_SIZE", "1")),
    )


class Nodes:
    """The machines of a run, seen from one of them. Made by `joined`; alone, every method does the obvious.

    Args:
        place: this machine's.
        peers: connections by machine: all others on machine 0, machine 0 on the others.
    """

    def __init__(self, place: NodeInfo, peers: Mapping[int, Connection] | None = None) -> None:
        self.place = place
        self._peers = dict(peers or {})
        self._mail: dict[int, queue.SimpleQueue[Any]] = {number: queue.SimpleQueue() for number in self._peers}
        self._heard = dict.fromkeys(self._peers, time.monotonic())
        self._left: set[int] = set()
        self._error: str | None = None
        self._sending = threading.Lock()
        self._closed = threading.Event()
        if self._peers:
            threading.Thread(target=self._listen, name="paceline machines", daemon=True).start()
            threading.Thread(target=self._show_life, name="paceline signs of life", daemon=True).start()

    @property
    def first(self) -> bool:
        """Whether this machine writes checkpoints and metrics."""
        return self.place.number == 0

    def error(self) -> str | None:
        """What ended the run on another machine, in a line; None while all are well."""
        return self._error

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """Machine 0 works, then all the others at once: what it leaves on a shared disk is there for them."""
        if not self.first:
            self._receive(0)
        result = work()
        if self.first:
            self._tell(("mail", None))
        return result

    def agree(self, facts: Mapping[str, Any], said: Any = None) -> Any:
        """Compare facts with machine 0's; all must be equal.

        Args:
            facts: by name, in words that a user knows.
            said: what machine 0 tells the others on this occasion.

        Returns:
            What machine 0 said.

        Raises:
            ConfigError: a line per machine with the names that differ.
        """
        if not self._peers:
            return said
        mine = {name: repr(value) for name, value in facts.items()}
        if self.first:
            theirs = {number: self._receive(number) for number in self._peers}
            errors = [error for number in sorted(theirs) for error in _differences(number, mine, theirs[number])]
            self._tell(("mail", (errors, said)))
        else:
            self._tell(("mail", mine))
            errors, said = self._receive(0)
        if errors:
            raise ConfigError(*errors)
        return said

    def close(self, failure: str | None = None) -> None:
        """Leave: orderly, or with the line that ends the run on all machines."""
        if not self._peers:
            return
        if failure is not None:
            self._tell(("failed", f"machine {self.place.number}: {failure}"))
        else:
            self._tell(("left", None))
            deadline = time.monotonic() + LEAVE_LIMIT_S
            while self.first and self._error is None and time.monotonic() < deadline:
                if self._left.issuperset(self._peers):
                    break
                time.sleep(0.02)
        self._closed.set()
        for connection in self._peers.values():
            connection.close()

    def _receive(self, number: int) -> Any:
        """The next mail of a machine; waits as long as all machines live, since preparing data may take hours."""
        while True:
            try:
                return self._mail[number].get(timeout=0.1)
            except queue.Empty:
                if self._error is not None:
                    raise StageError(self._error) from None

    def _tell(self, message: tuple[str, Any]) -> None:
        with self._sending:
            for number, connection in self._peers.items():
                try:
                    connection.send(message)
                except OSError:
                    self._lose(number, "closed its connection")

    def _lose(self, number: int, how: str) -> None:
        if number in self._left or self._error is not None or self._closed.is_set():
            return
        self._error = (
            f"machine {number} is gone: it {how}; checkpoints are intact, start all {self.place.count} machines again"
        )

    def _show_life(self) -> None:
        while not self._closed.wait(SIGN_EVERY_S):
            self._tell(("alive", None))
            for number, heard in list(self._heard.items()):
                if time.monotonic() - heard > SILENCE_LIMIT_S:
                    self._lose(number, f"has sent no sign of life for {SILENCE_LIMIT_S:.0f} s")

    def _listen(self) -> None:
        listening = {connection: number for number, connection in self._peers.items()}
        while listening and not self._closed.is_set():
            try:
                ready = wait(list(listening), timeout=0.5)
            except OSError:
                return
            for connection in ready:
                assert isinstance(connection, Connection)
                number = listening[connection]
                try:
                    kind, content = connection.recv()
                except (EOFError, OSError):
                    del listening[connection]
                    self._lose(number, "closed its connection")
                    continue
                self._heard[number] = time.monotonic()
                if kind == "mail":
                    self._mail[number].put(content)
                elif kind == "left":
                    self._left.add(number)
                    self._heard.pop(number)
                    del listening[connection]
                elif kind == "failed" and self._error is None:
                    self._error = content


ALONE = Nodes(NodeInfo())
"""One machine."""


@contextmanager
def joined(place: NodeInfo, limit_s: float) -> Generator[Nodes, None, None]:
    """Meet the other machines; leave them at the end, with the reason where it is an error.

    Args:
        place: from `node_info_of`.
        limit_s: how long to wait for the others.

    Raises:
        StageError: not all machines came.
    """
    if place.count == 1:
        yield ALONE
        return
    kept, machines = _meet(place, limit_s)
    failure: str | None = "was interrupted"
    try:
        yield machines
        failure = None
    except Exception as error:
        failure = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise
    finally:
        machines.close(failure)
        del kept


def meeting_prefix(place: NodeInfo) -> str:
    """Under which the machines of this start keep their entries of the store."""
    return f"paceline/{place.attempt}"


def _meet(place: NodeInfo, limit_s: float) -> tuple[Any, Nodes]:
    import torch.distributed as dist

    where = f"{place.address}:{place.port}"
    listens = place.number == 0 and not place.hosted
    waited = timedelta(seconds=limit_s)
    try:
        store = dist.TCPStore(place.address, place.port, is_master=listens, wait_for_workers=False, timeout=waited)
    except (dist.DistError, RuntimeError) as error:
        said = str(error).splitlines()[0]
        raise StageError(
            f"machine {place.number}: cannot {'listen' if listens else 'reach machine 0'} at {where} within "
            f"{limit_s:g} s ({said}); look at MASTER_ADDR, MASTER_PORT and firewalls (flow.stall_limit_s is the limit)"
        ) from None
    entry = f"{meeting_prefix(place)}/parents"
    if place.number == 0:
        return store, Nodes(place, _await_others(place, store, entry, limit_s))
    try:
        port, key = store.get(entry).decode().split("/")
        connection = Client((place.address, int(port)), authkey=bytes.fromhex(key))
        connection.send(place.number)
    except (dist.DistError, RuntimeError, OSError, EOFError) as error:
        raise StageError(f"machine {place.number}: cannot join machine 0 at {where} ({_line(error)})") from None
    return store, Nodes(place, {0: connection})


def _await_others(place: NodeInfo, store: Any, entry: str, limit_s: float) -> dict[int, Connection]:
    key = secrets.token_bytes(32)
    family = socket.getaddrinfo(place.address, None)[0][0]
    found: dict[int, Connection] = {}
    arrived: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
    deadline = time.monotonic() + limit_s
    with Listener(("::" if family == socket.AF_INET6 else "0.0.0.0", 0), authkey=key, backlog=place.count) as listener:
        store.set(entry, f"{listener.address[1]}/{key.hex()}")
        threading.Thread(target=_accept, args=(listener, arrived), name="paceline door", daemon=True).start()
        while len(found) < place.count - 1:
            try:
                number, connection = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = ", ".join(str(number) for number in range(1, place.count) if number not in found)
                raise StageError(
                    f"machine 0: of {place.count} machines, {missing} did not come within {limit_s:g} s; start them, "
                    "or raise flow.stall_limit_s"
                ) from None
            found[number] = connection
    return found


def _accept(listener: Listener, arrived: queue.SimpleQueue[tuple[int, Connection]]) -> None:
    """Lets machines in until the listener closes; whoever does not know the key is sent away."""
    while True:
        try:
            connection = listener.accept()
            arrived.put((int(connection.recv()), connection))
        except (AuthenticationError, EOFError, ConnectionError):
            continue
        except OSError:
            return


def _differences(number: int, ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return [
        f"machine {number}: {name} is {_short(theirs.get(name))}, machine 0 has {_short(value)}; "
        "all machines need the same settings, data, target and versions"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]


def _short(text: str | None) -> str:
    return "unset" if text is None else text if len(text) <= 60 else text[:57] + "..."


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def this_node() -> NodeInfo:
    """This process's place, from its own environment."""
    return node_info_of(os.environ)
