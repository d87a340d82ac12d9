"""Where a machine stands among several, and what its peers hear of it."""

from __future__ import annotations

import socket
import threading
from multiprocessing import Pipe

import pytest
import torch.distributed as dist

from paceline.errors import ConfigError, StageError
from paceline.pipeline import multinode
from paceline.pipeline.multinode import NodeInfo, Nodes, joined, node_info_of

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
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x is no whole number"),
    ],
)
def test_variables_that_contradict_are_refused(change: dict[str, str | None], words: str) -> None:
    environment = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        node_info_of(environment)


def two() -> tuple[Nodes, Nodes]:
    ours, theirs = Pipe()
    return Nodes(NodeInfo(0, 2), {1: ours}), Nodes(NodeInfo(1, 2), {0: theirs})


def heard(machine: Nodes) -> str:
    for _ in range(400):
        if machine.error() is not None:
            break
        threading.Event().wait(0.01)
    return machine.error() or ""


def test_facts_that_differ_are_named_on_both_machines() -> None:
    first, second = two()
    errors: list[str] = []

    def other() -> None:
        with pytest.raises(ConfigError) as caught:
            second.agree({"data": "a", "seed": 1}, None)
        errors.append(str(caught.value))

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(ConfigError, match=r"machine 1: seed is 1, machine 0 has 2"):
        first.agree({"data": "a", "seed": 2}, 7)
    thread.join(5.0)
    assert "seed is 1" in errors[0] and "data is" not in errors[0]
    first.close("x")
    second.close("x")


def test_what_machine_0_says_is_heard_by_all() -> None:
    first, second = two()
    said: list[int] = []
    thread = threading.Thread(target=lambda: said.append(second.agree({"seed": 1})))
    thread.start()
    assert first.agree({"seed": 1}, 12) == 12
    thread.join(5.0)
    assert said == [12]
    thread = threading.Thread(target=second.close)
    thread.start()
    first.close()
    thread.join(5.0)
    assert first.error() is None and second.error() is None


def test_a_failure_is_told_to_the_others_and_a_silent_end_is_noticed() -> None:
    first, second = two()
    second.close("stage target 0 failed on batch 3")
    assert heard(first) == "machine 1: stage target 0 failed on batch 3"
    first.close("x")
    ours, theirs = Pipe()
    first = Nodes(NodeInfo(0, 2), {1: ours})
    theirs.close()
    assert heard(first).startswith("machine 1 is gone: it closed its connection")
    with pytest.raises(StageError, match="machine 1 is gone"):
        first.agree({})
    first.close("x")


def test_a_machine_that_shows_no_life_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multinode, "SIGN_EVERY_S", 0.02)
    monkeypatch.setattr(multinode, "SILENCE_LIMIT_S", 0.1)
    ours, theirs = Pipe()
    first = Nodes(NodeInfo(0, 2), {1: ours})
    assert "no sign of life" in heard(first)
    first.close("x")
    theirs.close()


def test_machines_that_do_not_come_are_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        pytest.raises(StageError, match=r"of 3 machines, 1, 2 did not come within 0\.2 s"),
        joined(NodeInfo(0, 3, "127.0.0.1", port), 0.2),
    ):
        raise AssertionError("nobody came")
    assert not dist.is_initialized()
