"""Every process owns its device, and nothing in the package asks CUDA about "the current" card."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import device
from paceline.pipeline.messages import Ready
from paceline.pipeline.process import Stage, WorkerProcess

WITHOUT_A_CARD = {"is_available", "is_initialized", "device_count", "Event", "cudart", "get_sync_debug_mode"}
"""What may be called without a device: it touches none, or is bound to one by what is done with it."""
HOME = "src/paceline/device.py"
IN_VLLM = "vllm_side"
"""Files that run in vLLM's interpreter, which cannot import ours."""


def wrong_cuda_calls(source: str, *, home: bool) -> list[str]:
    """Calls of ``torch.cuda`` outside of its one module, or without a device; ``.record()`` on no named stream."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, bare = ast.unparse(node.func), not node.args and not node.keywords
        if name.startswith("torch.cuda.") and not home:
            found.append(f"line {node.lineno}: {name} outside of {HOME}")
        elif name.startswith("torch.cuda.") and bare and node.func.attr not in WITHOUT_A_CARD:
            found.append(f"line {node.lineno}: {name} without a device")
        elif node.func.attr == "record" and bare:
            found.append(f"line {node.lineno}: {name} without a stream")
    return found


def is_home(file: Path) -> bool:
    return file.as_posix() == HOME or file.parent.name == IN_VLLM


def test_no_cuda_call_without_a_device(project: Path) -> None:
    files = sorted((project / "src").rglob("*.py"))
    found = {
        str(file.relative_to(project)): wrong
        for file in files
        if (wrong := wrong_cuda_calls(file.read_text("utf-8"), home=is_home(file.relative_to(project))))
    }
    assert len(files) > 100
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0",
        "stream = torch.cuda.current_stream()",
        "copies = torch.cuda.Stream()",
        "event.record()",
    ],
)
def test_the_static_rule_sees_calls_without_a_device(line: str) -> None:
    assert wrong_cuda_calls(line, home=True)


def test_the_static_rule_allows_named_devices() -> None:
    assert wrong_cuda_calls("torch.cuda.synchronize(card); event.record(stream)", home=True) == []
    assert wrong_cuda_calls("torch.cuda.synchronize(card)", home=False)


def test_values_of_the_host_go_through_page_locked_memory(project: Path) -> None:
    """From other memory CUDA waits for its queue before each copy; `to_device` alone takes values of numpy."""
    made = (".from_numpy(", "torch.as_tensor(", "torch.tensor(")
    files = [file for role in ("drafter", "target_model") for file in (project / "src/paceline" / role).rglob("*.py")]
    files = [file for file in files if file.parent.name != IN_VLLM]
    found = {file.name for file in files if any(name in file.read_text("utf-8") for name in made)}
    # Whole states, messages between ranks, and what happens once a run or in windows that are diagnosed.
    assert found <= {"host_copy.py", "distributed.py", "tree.py", *OF_THE_START}


OF_THE_START = {"engine_proof.py", "introspect.py", "row_check.py", "shared_weights.py", "tap_guard.py"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpu", "cpu"),
        ("cuda", "cuda:0"),
        ("cuda:3", "cuda:3"),
        ("cuda:2+cuda:0", "cuda:2"),
        (torch.device("cuda"), "cuda:0"),
    ],
)
def test_main_device_is_the_first_with_its_number(name: Any, expected: str) -> None:
    assert str(device.main_device(name)) == expected


@pytest.mark.parametrize(
    ("name", "cards", "reason"),
    [
        ("cuda", 0, "cuda: this machine has no CUDA device"),
        ("cuda:0", 0, "cuda:0: this machine has no CUDA device"),
        ("cuda:2", 2, "cuda:2: this machine has 2 CUDA devices, cuda:0 to cuda:1"),
        ("mps", 2, "mps: not a device of paceline"),
        ("npu:0", 2, "npu:0: not a device of paceline"),
        ("cuda:x", 2, "cuda:x: not a device of paceline"),
        ("cpu:1", 2, "cpu:1: not a device of paceline"),
    ],
)
def test_devices_that_are_not_here_are_named(
    name: str, cards: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "num_cards", lambda: cards)
    found = device.why_missing(name)
    assert found is not None and found.startswith(reason)


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:1"])
def test_devices_that_are_here_are_fine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_cards", lambda: 2)
    assert device.why_missing(name) is None


def test_marks_on_a_cpu_are_points_in_time() -> None:
    begun, ended = device.Mark("cpu", timed=True), device.Mark("cpu", timed=True)
    ended.wait()
    assert ended.reached()
    assert ended.seconds_since(begun) > 0
    with device.on_stream(device.side_stream("cpu")):
        pass


def test_deterministic_algorithms_inside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)
    with device.deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with device.deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic


@pytest.mark.parametrize("wanted", [False, True])
def test_a_worker_computes_as_it_is_told(wanted: bool) -> None:
    worker = WorkerProcess("drafter 0", TellsAlgorithms, (), deterministic=wanted)
    try:
        assert isinstance(worker.connection.recv().payload, Ready)
        worker.send("ask")
        assert worker.connection.recv().payload is wanted
    finally:
        worker.stop(5.0)


class TellsAlgorithms(Stage):
    def handle(self, message: Any) -> Iterator[bool]:
        yield torch.are_deterministic_algorithms_enabled()
