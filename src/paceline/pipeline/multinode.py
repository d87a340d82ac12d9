"""Several machines, one pipeline each: who they are, what they must agree on, and that none of them waits for good.

Each machine runs one `paceline train`, started by torchrun or with the same variables set by hand. The parents meet in
torch's key-value store at MASTER_ADDR:MASTER_PORT, which torchrun keeps, or machine 0. They write JSON there, so what a
machine reads cannot run code. The store itself lets everybody in who reaches it: where PACELINE_SECRET is set, every
message carries a keyed hash, and one without it ends the run. Gradients and counters cross the group of the drafter
ranks, which listen on the interface of MASTER_ADDR alone, on 127.0.0.1 where there is one machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import json
import os
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ConfigError, StageError
from paceline.text import first_line

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SECRET, SECRET_FILE = "PACELINE_SECRET", "PACELINE_SECRET_FILE"
SIGN_EVERY_S = 1.0
"""Seconds between two signs of life."""
SILENCE_LIMIT_S = 20.0
"""A machine without a sign of life for this long counts as gone."""
SUSPECT_LIMIT_S = 4.0
"""The same once a drafter rank misses another one: then some machine is most likely gone."""
LEAVE_LIMIT_S, FAILED_LEAVE_LIMIT_S = 30.0, 5.0
"""Where machine 0 keeps the store, it waits this long for the others to leave: at the end, and after an error."""
MAX_STEPS_AHEAD = 2
"""Steps that a machine's coordinator may be ahead of the last one that all machines have taken."""
POLL_S = 0.1

Result = TypeVar("Result")


@dataclass(frozen=True)
class NodeInfo:
    """One machine's place among several.

    Attributes:
        number, count: which machine, of how many.
        address, port: of the store at which they meet.
        hosted: whether the launcher keeps that store, or machine 0 must.
        attempt: restarts by the launcher, whose entries in the store are kept apart.
        on_this_host: how many of them are on this host.
    """

    number: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    hosted: bool = False
    attempt: str = "0"
    on_this_host: int = 1

    @property
    def where(self) -> str:
        """Address and port of the store, for errors."""
        return f"{self.address}:{self.port}"


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
        if not environment[name].isdecimal():
            raise ConfigError(f"environment: {name}={environment[name]}: not a whole number; start with torchrun")
        values[name] = int(environment[name])
    if values["RANK"] >= values["WORLD_SIZE"]:
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


def this_node() -> NodeInfo:
    """This process's place, from its environment."""
    return node_info_of(os.environ)


def secret_of(environment: Mapping[str, str]) -> bytes | None:
    """The secret that the machines of a run share: PACELINE_SECRET, or the content of the file PACELINE_SECRET_FILE.

    Raises:
        ConfigError: the file cannot be read, is empty, or others than its owner may read it.
    """
    if SECRET in environment:
        return environment[SECRET].encode()
    if SECRET_FILE not in environment:
        return None
    path = Path(environment[SECRET_FILE])
    try:
        secret, mode = path.read_bytes().strip(), path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"environment: {SECRET_FILE}={path}: {first_line(error)}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"environment: {SECRET_FILE}={path}: others may read it; run chmod 600 {path}")
    if not secret:
        raise ConfigError(f"environment: {SECRET_FILE}={path}: empty; put the same long random text on all machines")
    return secret


class Messages:
    """Plain values under keys of the store, which one machine writes and the others read.

    Args:
        store: of torch.
        here: this machine.
        secret: of the run, if it has one.
    """

    def __init__(self, store: Any, here: NodeInfo, secret: bytes | None) -> None:
        self._store, self._here, self._secret = store, here, secret

    def write(self, key: str, value: Any) -> None:
        """Put a plain value; one that is there already is overwritten.

        Raises:
            StageError: the store is gone.
        """
        name, text = self._name(key), json.dumps(value)
        with self._reached():
            self._store.set(name, json.dumps([text, self._signature(name, text)]))

    def read(self, key: str) -> Any:
        """The value; None where there is none yet. Never waits.

        Raises:
            StageError: the store is gone, or what is there was not written by a machine of this run.
        """
        name = self._name(key)
        with self._reached():
            if not self._store.check([name]):
                return None
            found = self._store.get(name)
        try:
            text, signature = json.loads(found)
            if not hmac.compare_digest(str(signature), self._signature(name, str(text))):
                raise ValueError("its secret is not this machine's")
            return json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise StageError(
                f"store at {self._here.where}: the entry {key} is not from a machine of this run "
                f"({first_line(error)}); set the same {SECRET} on all machines, and let only them reach this port"
            ) from None

    def _name(self, key: str) -> str:
        return f"paceline/{self._here.attempt}/{key}"

    @contextmanager
    def _reached(self) -> Generator[None]:
        """What torch raises where the store is gone, as the error of the run."""
        try:
            yield
        except RuntimeError as error:
            how = f"the store at {self._here.where} ended ({first_line(error)})"
            raise StageError(_gone(0, how, self._here.count)) from None

    def _signature(self, name: str, text: str) -> str:
        """Keyed hash of a message, which is another one under another key and after another start."""
        if self._secret is None:
            return ""
        return hmac.new(self._secret, f"{name}\n{text}".encode(), hashlib.sha256).hexdigest()


def _gone(number: int, how: str, count: int) -> str:
    return f"machine {number} is gone: {how}; checkpoints are intact, start all {count} machines again"


class Nodes:
    """The machines of a run, seen from one of them. Made by `joined`; alone, every method does the obvious.

    Args:
        here: this machine.
        messages: of the machines; None for one that is alone.
    """

    def __init__(self, here: NodeInfo, messages: Messages | None = None) -> None:
        self.here = here
        self._messages = messages
        self._error: str | None = None
        self._turns = 0
        self._silence_limit_s = SILENCE_LIMIT_S
        self._answered = time.monotonic()
        self._closed = threading.Event()
        if messages is not None:
            threading.Thread(target=self._watch, args=(messages,), name="paceline machines", daemon=True).start()

    @property
    def first(self) -> bool:
        """Whether this machine writes checkpoints and metrics."""
        return self.here.number == 0

    @property
    def others(self) -> list[int]:
        """Numbers of the other machines."""
        return [number for number in range(self.here.count) if number != self.here.number]

    def error(self) -> str | None:
        """What ended the run on another machine, in a line; None while all are well."""
        if self._error is None and time.monotonic() - self._answered > self._silence_limit_s and self._watching:
            self._error = _gone(0, f"the store at {self.here.where} does not answer", self.here.count)
        return self._error

    def suspect(self) -> None:
        """A rank misses another one: a machine that is silent counts as gone much earlier from now on."""
        self._silence_limit_s = SUSPECT_LIMIT_S

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """Machine 0 works, then all the others at once: what it leaves on a shared disk is there for them."""
        self._turns += 1
        if self._messages is None:
            return work()
        key = f"turn/{self._turns}"
        if not self.first:
            self._await(key)
        result = work()
        if self.first:
            self._messages.write(key, True)
        return result

    def agree(self, facts: Mapping[str, Any], said: Any = None) -> Any:
        """Compare facts with machine 0's; all must be equal.

        Args:
            facts: by name, as a user knows them.
            said: plain value that machine 0 sends to the others.

        Returns:
            What machine 0 said.

        Raises:
            ConfigError: a line per machine and name that differs.
        """
        if self._messages is None:
            return said
        self._turns += 1
        mine = {name: repr(value) for name, value in facts.items()}
        if self.first:
            errors = [
                line
                for number in self.others
                for line in _differences(number, mine, self._await(f"facts/{self._turns}/{number}"))
            ]
            self._messages.write(f"agreed/{self._turns}", [errors, said])
        else:
            self._messages.write(f"facts/{self._turns}/{self.here.number}", mine)
            errors, said = self._await(f"agreed/{self._turns}")
        if errors:
            raise ConfigError(*errors)
        return said

    def close(self, failure: str | None = None) -> None:
        """Leave: orderly, or with the line that ends the run on all machines."""
        if self._messages is None:
            return
        try:
            if failure is not None and self._error is None:
                self._messages.write("failed", f"machine {self.here.number}: {failure}")
            self._messages.write(f"left/{self.here.number}", True)
            if self.first and not self.here.hosted:
                limit_s = LEAVE_LIMIT_S if failure is None else FAILED_LEAVE_LIMIT_S
                self._await_leaving(self._messages, time.monotonic() + limit_s)
        except StageError:
            return  # the run has ended, and so has the store
        finally:
            self._closed.set()

    def _await_leaving(self, messages: Messages, deadline: float) -> None:
        """The store ends with this process: the others must have read what they need."""
        while not all(messages.read(f"left/{number}") for number in self.others) and time.monotonic() < deadline:
            self._closed.wait(POLL_S)

    def _await(self, key: str) -> Any:
        """A message; waits as long as all machines live, since preparing data may take hours."""
        assert self._messages is not None, "a machine that is alone waits for nobody"
        while True:
            value = self._messages.read(key)
            if value is not None:
                return value
            if (error := self.error()) is not None:
                raise StageError(error)
            self._closed.wait(POLL_S)

    @property
    def _watching(self) -> bool:
        return self._messages is not None and not self._closed.is_set()

    def _watch(self, messages: Messages) -> None:
        """Show that this machine lives, and look whether the others do: machine 0 at all of them, they at machine 0."""
        watched = self.others if self.first else [0]
        signs: dict[int, tuple[int, float]] = dict.fromkeys(watched, (0, time.monotonic()))
        count = 0
        while self._error is None:
            count += 1
            try:
                messages.write(f"alive/{self.here.number}", count)
                self._error = messages.read("failed")
                for number in list(signs):
                    self._look_at(messages, number, signs)
            except StageError as error:
                if not self._closed.is_set():
                    self._error = error.errors[0]
            self._answered = time.monotonic()
            if self._closed.wait(SIGN_EVERY_S):
                return

    def _look_at(self, messages: Messages, number: int, signs: dict[int, tuple[int, float]]) -> None:
        sign, seen = messages.read(f"alive/{number}") or 0, signs[number]
        if sign != seen[0]:
            signs[number] = (sign, time.monotonic())
        elif messages.read(f"left/{number}"):
            del signs[number]
        elif (silent_s := time.monotonic() - seen[1]) > self._silence_limit_s:
            self._error = _gone(number, f"no sign of life for {silent_s:.0f} s", self.here.count)
            messages.write("failed", self._error)


ALONE = Nodes(NodeInfo())
"""One machine."""


@contextmanager
def joined(here: NodeInfo, limit_s: float) -> Generator[Nodes]:
    """Meet the other machines; leave them at the end, with the reason where it is an error.

    Args:
        here: from `node_info_of`.
        limit_s: how long to wait for the others.

    Raises:
        ConfigError: the secret cannot be read.
        StageError: not all machines came.
    """
    if here.count == 1:
        yield ALONE
        return
    secret = secret_of(os.environ)
    nodes = _meet(here, Messages(_open_store(here, limit_s), here, secret), limit_s)
    failure: str | None = "was interrupted"
    try:
        yield nodes
        failure = None
    except Exception as error:
        failure = first_line(error)
        raise
    finally:
        nodes.close(failure)


def _open_store(here: NodeInfo, limit_s: float) -> Any:
    """The store of the machines: this one keeps it, on the address of MASTER_ADDR alone, or connects to it."""
    import torch.distributed as dist

    listens = here.number == 0 and not here.hosted
    try:
        listener = socket.create_server((here.address, here.port), family=_family(here.address)) if listens else None
        store = dist.TCPStore(
            here.address,
            here.port,
            is_master=listens,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        raise StageError(
            f"machine {here.number}: cannot {'listen' if listens else 'reach machine 0'} at {here.where} within "
            f"{limit_s:g} s ({first_line(error)}); look at MASTER_ADDR, MASTER_PORT and firewalls "
            "(flow.stall_limit_s is the limit)"
        ) from None
    store.set_timeout(timedelta(seconds=SILENCE_LIMIT_S))
    return store


def _meet(here: NodeInfo, messages: Messages, limit_s: float) -> Nodes:
    """Wait until all machines are there."""
    messages.write(f"here/{here.number}", True)
    deadline = time.monotonic() + limit_s
    missing = list(range(here.count))
    while missing := [number for number in missing if not messages.read(f"here/{number}")]:
        if time.monotonic() > deadline:
            raise StageError(
                f"machine {here.number}: of {here.count} machines, {', '.join(map(str, missing))} did not come within "
                f"{limit_s:g} s; start them, or raise flow.stall_limit_s"
            )
        time.sleep(POLL_S)
    return Nodes(here, messages)


def _differences(number: int, ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return [
        f"machine {number}: {name} is {_short(theirs.get(name))}, machine 0 has {_short(value)}; "
        "all machines need the same settings, data, target and versions"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]


def _short(text: str | None) -> str:
    return "unset" if text is None else text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class RankInfo:
    """Where a drafter rank finds the others; pickles.

    Attributes:
        rank, size: which rank, of how many.
        folder: of the file by which the ranks of one machine meet; None: the store of the machines.
        node: this machine.
    """

    rank: int
    size: int
    folder: str | None
    node: NodeInfo = NodeInfo()

    @property
    def across_machines(self) -> bool:
        """Whether some of the ranks are on other machines."""
        return self.folder is None

    @property
    def on_this_machine(self) -> int:
        """Ranks of this machine."""
        return self.size // self.node.count

    def join(self, device: str) -> Any:
        """Meet the other ranks; the torch.distributed group of all of them."""
        import torch.distributed as dist

        from paceline.device import own_device

        if self.folder is None:
            store = dist.TCPStore(self.node.address, self.node.port, is_master=False)
            name = interface_of(local_address(self.node))
        else:
            store = dist.FileStore(str(Path(self.folder) / "ranks"), self.size)
            name = interface_of("127.0.0.1")
        for variable, value in (("GLOO_SOCKET_IFNAME", name), ("NCCL_SOCKET_IFNAME", name and f"={name}")):
            if value is not None:
                os.environ.setdefault(variable, value)
        dist.init_process_group(
            "nccl" if own_device(device).type == "cuda" else "gloo",
            store=dist.PrefixStore(f"paceline/{self.node.attempt}/ranks", store),
            rank=self.rank,
            world_size=self.size,
        )
        return dist.group.WORLD

    def machine_group(self) -> Any:
        """The torch.distributed group of this machine's ranks; all ranks ask, once, after `join`."""
        import torch.distributed as dist

        if not self.across_machines:
            return dist.group.WORLD
        here = self.on_this_machine
        groups = [dist.new_group(list(range(first, first + here))) for first in range(0, self.size, here)]
        return groups[self.node.number]


@contextmanager
def rank_groups(nodes: Nodes, num_here: int) -> Generator[Sequence[RankInfo | None]]:
    """Where each drafter rank of this machine finds the others; None for one that is alone.

    Ranks of one machine meet by a file in a folder that only this user may enter, so no port is opened for it.

    Args:
        nodes: the machines.
        num_here: ranks of each of them.
    """
    here, size = nodes.here, nodes.here.count * num_here
    if size == 1:
        yield [None]
        return
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as folder:  # made with mode 0700
        meeting = folder if here.count == 1 else None
        yield [RankInfo(here.number * num_here + rank, size, meeting, here) for rank in range(num_here)]


def local_address(node: NodeInfo) -> str:
    """The address of this machine on the network of MASTER_ADDR."""
    with socket.socket(_family(node.address), socket.SOCK_DGRAM) as probe:
        probe.connect((node.address, node.port))  # sends nothing: the system only chooses the way
        return str(probe.getsockname()[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, None)[0][0]


def interface_of(address: str) -> str | None:
    """Name of the network interface that has an address, on Linux; None where it is not known."""
    if not sys.platform.startswith("linux"):
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            if ipaddress.ip_address(bytes.fromhex(digits)) == wanted:
                return name
        return None
    if wanted.is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            if ipaddress.ip_address(found[20:24]) == wanted:
                return name
    return None


_SIOCGIFADDR = 0x8915
"""Asks Linux for the IPv4 address of an interface (netdevice(7))."""
