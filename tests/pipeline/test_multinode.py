"""Machines that train together: what they agree on, what they learn of one another's end, and who may speak to them."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable, Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.errors import ConfigError, StageError
from paceline.pipeline import multinode
from paceline.pipeline.multinode import (
    ALONE,
    Messages,
    NodeInfo,
    Nodes,
    interface_of,
    joined,
    local_address,
    node_info_of,
    rank_groups,
    secret_of,
)

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_the_place_comes_from_torchruns_variables() -> None:
    assert node_info_of(TORCHRUN) == NodeInfo(1, 3, "node0", 29500)
    hosted = node_info_of({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert hosted.hosted and hosted.attempt == "2"


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, {**TORCHRUN, "WORLD_SIZE": "1"}])
def test_a_process_that_was_not_started_with_others_is_alone(environment: dict[str, str]) -> None:
    assert node_info_of(environment).count == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_ADDR": None}, "WORLD_SIZE is set but MASTER_ADDR not"),
        ({"RANK": "3"}, "RANK 3 is not one of WORLD_SIZE 3"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x: not a whole number"),
    ],
)
def test_variables_that_contradict_are_refused(change: dict[str, str | None], words: str) -> None:
    environment = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        node_info_of(environment)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def two(store: Any, monkeypatch: pytest.MonkeyPatch) -> Generator[tuple[Nodes, Nodes]]:
    """Two machines in this process, each with a connection to the same store."""
    monkeypatch.setattr(multinode, "SIGN_EVERY_S", 0.02)
    monkeypatch.setattr(multinode, "POLL_S", 0.01)
    nodes = []
    for number in range(2):
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        here = NodeInfo(number, 2, "127.0.0.1", store.port, hosted=True)
        nodes.append(Nodes(here, Messages(client, here, None)))
    yield nodes[0], nodes[1]
    for node in nodes:
        node.close("x")


def reported(node: Nodes) -> str:
    for _ in range(1000):
        if node.error() is not None:
            break
        threading.Event().wait(0.01)
    return node.error() or ""


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begins work on a thread; the result gives what it returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(20.0)
        return found[0]

    return result


def test_facts_that_differ_are_named_on_both_machines(two: tuple[Nodes, Nodes]) -> None:
    other = beside(lambda: two[1].agree({"data": "a", "seed": 1}))
    with pytest.raises(ConfigError, match=r"machine 1: seed is 1, machine 0 has 2"):
        two[0].agree({"data": "a", "seed": 2}, 7)
    text = str(other())
    assert "seed is 1" in text and "data is" not in text


def test_what_machine_0_says_reaches_all(two: tuple[Nodes, Nodes]) -> None:
    for said in (12, None, 13):
        other = beside(lambda: two[1].agree({"seed": 1}))
        assert two[0].agree({"seed": 1}, said) == said
        assert other() == said
    ending = beside(two[1].close)
    two[0].close()
    assert ending() is None and two[0].error() is None and two[1].error() is None


def test_machine_0_works_before_the_others(two: tuple[Nodes, Nodes]) -> None:
    order: list[int] = []
    other = beside(lambda: two[1].in_turn(lambda: order.append(1)))
    assert not order
    two[0].in_turn(lambda: order.append(0))
    other()
    assert order == [0, 1]


def test_a_failure_reaches_the_others(two: tuple[Nodes, Nodes]) -> None:
    two[1].close("stage target 0 failed on batch 3")
    assert reported(two[0]) == "machine 1: stage target 0 failed on batch 3"
    with pytest.raises(StageError, match="stage target 0 failed on batch 3"):
        two[0].agree({})


def test_a_machine_that_shows_no_life_is_gone(two: tuple[Nodes, Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two[1], "_watch", lambda messages: None)
    two[1]._closed.set()  # its thread ends without a word
    monkeypatch.setattr(multinode, "SUSPECT_LIMIT_S", 0.3)
    two[0].suspect()
    assert reported(two[0]).startswith("machine 1 is gone: no sign of life for ")


def test_a_store_that_ends_is_machine_0_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multinode, "SIGN_EVERY_S", 0.02)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    here = NodeInfo(1, 2, "127.0.0.1", store.port)
    node = Nodes(here, Messages(client, here, None))
    del store
    assert reported(node).startswith("machine 0 is gone: the store at 127.0.0.1:")
    with pytest.raises(StageError, match="machine 0 is gone"):
        node.agree({})
    node.close("x")


def test_machines_that_do_not_come_are_named() -> None:
    here = NodeInfo(0, 3, "127.0.0.1", free_port())
    with pytest.raises(StageError, match=r"of 3 machines, 1, 2 did not come within 0\.2 s"), joined(here, 0.2):
        raise AssertionError("nobody came")
    assert not dist.is_initialized()


def test_an_address_of_another_machine_is_refused() -> None:
    here = NodeInfo(0, 2, "192.0.2.1", free_port())  # an address that documentation may use, and no machine has
    with pytest.raises(StageError, match=r"cannot listen at 192\.0\.2\.1:\d+ .*look at MASTER_ADDR"), joined(here, 0.2):
        raise AssertionError("it is not ours")


# Who may speak to them.


class Bomb:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Path(os.environ["BOMB"])),)


def test_what_a_stranger_leaves_in_the_store_runs_no_code(
    two: tuple[Nodes, Nodes], store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "ran"))
    store.set("paceline/0/facts/1/1", pickle.dumps(Bomb()))
    with pytest.raises(StageError, match="the entry facts/1/1 is not from a machine of this run"):
        two[0].agree({"seed": 1})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("entry", [b"", b"[]", b'"text"', b'["{}", "", ""]', b"\xff\xfe", b"[" * 100_000])
def test_entries_that_are_not_messages_are_one_line(store: Any, entry: bytes) -> None:
    store.set("paceline/0/key", entry)
    with pytest.raises(StageError, match="the entry key is not from a machine of this run") as caught:
        Messages(store, NodeInfo(), None).read("key")
    assert "\n" not in str(caught.value)


def test_a_message_without_the_secret_is_refused(store: Any) -> None:
    ours, strangers = (Messages(store, NodeInfo(), secret) for secret in (b"secret", b"guess"))
    ours.write("a", [1, 2])
    assert ours.read("a") == [1, 2] and ours.read("b") is None
    strangers.write("b", [3])
    with pytest.raises(StageError, match="its secret is not this machine's"):
        ours.read("b")
    Messages(store, NodeInfo(), None).write("c", [4])
    with pytest.raises(StageError, match="its secret is not this machine's"):
        ours.read("c")
    store.set("paceline/0/d", store.get("paceline/0/a"))  # a true message under another key
    with pytest.raises(StageError, match="its secret is not this machine's"):
        ours.read("d")


def test_the_secret_is_a_variable_or_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("long and random\n")
    file.chmod(0o600)
    assert secret_of({}) is None
    assert secret_of({"PACELINE_SECRET": "word"}) == b"word"
    assert secret_of({"PACELINE_SECRET_FILE": str(file)}) == b"long and random"
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read it; run chmod 600"):
        secret_of({"PACELINE_SECRET_FILE": str(file)})
    with pytest.raises(ConfigError, match="No such file"):
        secret_of({"PACELINE_SECRET_FILE": str(tmp_path / "nowhere")})


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b"\xff" * 65536])
def test_a_connection_that_says_nothing_or_nonsense_harms_nobody(words: bytes) -> None:
    """It is held open while two machines meet, agree and leave."""
    port = free_port()
    nodes = [NodeInfo(number, 2, "127.0.0.1", port) for number in range(2)]

    def machine(here: NodeInfo) -> Any:
        with joined(here, 20.0) as node:
            return node.agree({"seed": 1}, here.number)

    first = beside(lambda: machine(nodes[0]))
    strangers = []
    while not strangers:
        try:
            strangers.append(socket.create_connection(("127.0.0.1", port), timeout=1.0))
        except OSError:
            continue
    strangers[0].sendall(words)
    second = beside(lambda: machine(nodes[1]))
    assert (first(), second()) == (0, 0)
    strangers[0].close()


def test_ranks_of_one_machine_meet_in_a_private_folder() -> None:
    with rank_groups(ALONE, 2) as (first, second):
        assert first is not None and second is not None
        folder = Path(first.folder or "")
        assert folder.stat().st_mode & 0o777 == 0o700 and second.folder == first.folder
        assert [(first.rank, first.size), (second.rank, second.size)] == [(0, 2), (1, 2)]
        assert not first.across_machines
    assert not folder.exists()
    with rank_groups(ALONE, 1) as groups:
        assert groups == [None]
    here = NodeInfo(1, 3, "127.0.0.1", 1)
    with rank_groups(Nodes(here), 2) as groups:
        assert [(group.rank, group.size, group.folder) for group in groups if group] == [(2, 6, None), (3, 6, None)]


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") is None
    assert local_address(NodeInfo(1, 2, "127.0.0.1", 29500)) == "127.0.0.1"
