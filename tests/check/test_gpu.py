"""The acceptance of a device, on a CPU with small sizes: every check runs, and finds what is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.check import gpu_numbers
from paceline.check.gpu import gpu_checks
from paceline.cli import main


@pytest.mark.slow
def test_every_check_passes_or_is_skipped(tmp_path):
    found = gpu_checks("cpu", "ABCD", tmp_path, lambda *_: None, tiny=True)
    statuses = {result["name"]: (result["status"], result["detail"]) for result in found["results"]}
    assert {status for status, _ in statuses.values()} == {"pass", "skipped"}, statuses
    skipped = {name.split(" ", 1)[1] for name, (status, _) in statuses.items() if status == "skipped"}
    assert skipped == {"graphs", "waits", "gauges", "memory"}
    json.dumps(found)


def test_a_wrong_kernel_fails(tmp_path, monkeypatch):
    def off(*arguments):
        return right(*arguments) + 0.01

    right = gpu_numbers.BACKENDS["split"]
    monkeypatch.setitem(gpu_numbers.BACKENDS, "split", off)
    monkeypatch.setattr("paceline.check.gpu.NUMBERS", {"attention": gpu_numbers.attention})
    (result,) = gpu_checks("cpu", "A", tmp_path, lambda *_: None, tiny=True)["results"]
    assert result["status"] == "fail" and "float32" in result["detail"]


def test_a_crash_is_a_result(tmp_path, monkeypatch):
    def crash(bench):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("paceline.check.gpu.NUMBERS", {"head": crash})
    (result,) = gpu_checks("cpu", "A", tmp_path, lambda *_: None, tiny=True)["results"]
    assert result["status"] == "fail" and "illegal memory access" in result["detail"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpu", "cpu"], "add --tiny"),
        (["--gpu", "cpu", "--tiny", "--stages", "AX"], "letters of A, B, C, D"),
        (["run.yaml", "--gpu", "cpu", "--tiny"], "give one of them"),
        (["--gpu", "mps"], "not a device of paceline"),
    ],
)
def test_misuse_is_one_line(words, says, capsys):
    assert main(["check", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_card_is_accepted(tmp_path):
    found = gpu_checks("cuda:0", "AB", tmp_path, lambda *_: None, tiny=False)
    assert not [result for result in found["results"] if result["status"] == "fail"]
