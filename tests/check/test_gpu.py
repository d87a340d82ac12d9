"""The acceptance of a device, on a CPU with small sizes: every check runs, and finds what is wrong."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from paceline.check import gpu_numbers, gpu_runs, gpu_target
from paceline.check.gpu import gpu_checks
from paceline.check.gpu_bench import Bench
from paceline.check.gpu_runs import command_of
from paceline.cli import main
from paceline.config import load_settings
from paceline.pipeline.telemetry import PipelineTelemetry
from paceline.run.support import check_support


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


def test_the_runs_of_a_card_are_accepted(tmp_path, monkeypatch):
    """What refuses settings must let the runs of stages B and D pass where they are made for a card."""
    monkeypatch.setattr("paceline.device.num_cards", lambda: 1)
    bench = Bench("cuda:0", tiny=False, folder=tmp_path)
    for name, flags in (("inline", {}), ("pipeline", {"flow.mode": "pipeline"}), ("d", {"flow.delivery": "ready"})):
        words = command_of(bench, name, **flags)
        settings = load_settings(tmp_path / f"{name}.yaml", dict(word[2:].split("=", 1) for word in words[5:]))
        assert settings.flow.target_devices == settings.flow.drafter_devices == ["cuda:0"]
        assert settings.train.deterministic
        check_support(settings)


def test_features_that_do_not_arrive_fail(tmp_path, monkeypatch):
    honest = gpu_target.HandOver.send

    def late(way, buffer, batch):
        sent = honest(way, buffer, batch)
        way._pool.view(buffer, 1).add_(1.0)
        return sent

    bench = Bench("cpu", tiny=True, folder=tmp_path)
    assert gpu_target.hand_over(bench).status == "pass"
    monkeypatch.setattr(gpu_target.HandOver, "send", late)
    assert gpu_target.hand_over(bench).status == "fail"


def test_the_targets_share_counts_the_layers_that_run(tmp_path, monkeypatch):
    """Three of its four layers are run."""
    bench = Bench("cpu", tiny=True, folder=tmp_path, peak_flops=1e9)
    monkeypatch.setattr(gpu_target, "seconds_of", lambda device, work, repeats: work() and 1.0)
    target = gpu_target.target_of(bench)
    assert target.taps == [1, 2] and not target.masked
    layer = 64 * 64 * 2 + 64 * 16 * 2 + 3 * 64 * 192
    flops = 3 * (2 * layer * 256 + 4 * 64 * 4 * 64**2 / 2)
    assert gpu_target.target_forward(bench).figures["share_4x64"] == pytest.approx(flops / 1e9)


def test_gauges_are_those_that_workers_log(tmp_path, monkeypatch):
    bench = Bench("cuda:0", tiny=True, folder=tmp_path)
    logged = {"memory_peak/target_0_gpu_bytes": 5.0, "memory_peak/drafter_0_gpu_bytes": 7.0, "loss": 0.0}
    monkeypatch.setattr(gpu_runs, "run", lambda *_, **__: tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "values": logged}) + "\n")
    assert gpu_runs.gauges(bench).status == "pass"
    logged["memory_peak/drafter_0_gpu_bytes"] = 0.0
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "values": logged}) + "\n")
    assert gpu_runs.gauges(bench).status == "fail"
    sink: dict[str, int] = {}
    telemetry = PipelineTelemetry(SimpleNamespace(gauge=sink.__setitem__, span=lambda *_: None), 1, 1, {})
    telemetry.memory("target_0", 3, 4)
    telemetry.depths((), [], 0)
    assert sink["memory_peak/target_0_gpu_bytes"] == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_card_is_accepted(tmp_path):
    found = gpu_checks("cuda:0", "AB", tmp_path, lambda *_: None, tiny=False)
    assert not [result for result in found["results"] if result["status"] == "fail"]
