"""The worker's side of an engine: what a batch gets, and what is said when the engine fails. The engine is a stand-in
that really is another process; real vLLM is in tests/serving."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import host_batch
from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.vllm_environment import EXTRACTOR, find_vllm
from paceline.target_model.vllm_target import VllmTarget, engine_options

ABORTS, ALWAYS_ABORTS, FAILS, DIES, HANGS = 90, 91, 92, 93, 94
"""First tokens at which the stand-in goes wrong; see `stand_in_engine`."""

ROWS = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment whose python is the stand-in."""
    folder = tmp_path_factory.mktemp("vllm") / "environment"
    packages = folder / "lib" / "python3.11" / "site-packages"
    (packages / EXTRACTOR).parent.mkdir(parents=True)
    (packages / EXTRACTOR).touch()
    (packages / "vllm-0.32.0+cpu.dist-info").mkdir()
    (packages / "vllm-0.32.0+cpu.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.32.0+cpu\n")
    (folder / "bin").mkdir()
    program = folder / "bin" / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("stand_in_engine.py")} "$2"\n')
    program.chmod(0o755)
    return folder


def _start(environment: Path, qwen3: Path, **options: Any) -> VllmTarget:
    """The stand-in for a tiny target with taps 2 and 0, not ascending, to see columns mixed up."""
    settings = TargetConfig(
        path=str(qwen3),
        dtype="float32",
        engine="vllm",
        vllm_environment=str(environment),
        vllm=options,
        vllm_patience_s=1.0,
    )
    log = environment / "log"
    return VllmTarget(settings, [2, 0], "cpu", with_last=True, longest=64, log=log)


@pytest.fixture(scope="module")
def target(environment: Path, qwen3: Path) -> Iterator[VllmTarget]:
    """A stand-in that runs."""
    target = _start(environment, qwen3)
    yield target
    target.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(target._process.pid, 0)


@pytest.mark.parametrize("first", [5, ABORTS], ids=["plain", "aborted"])
def test_every_token_has_its_own_states_once(target: VllmTarget, first: int) -> None:
    rows = [[first, 6, 7], *ROWS[1:]]
    target.features(host_batch([[1] * 60] * 20))  # what it leaves behind must not be taken for the next batch's
    batch = target.features(host_batch(rows))
    ids = torch.tensor([token for row in rows for token in row])
    of_layer = {layer: (ids + 1000 * layer)[:, None].expand(-1, 32).float() for layer in (1, 3, 4)}
    assert batch.last_hidden is not None
    assert torch.equal(batch.features, torch.cat([of_layer[3], of_layer[1]], dim=1))
    assert torch.equal(batch.last_hidden, of_layer[4])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([ALWAYS_ABORTS], r"vLLM aborted samples \[0, 1, 2, 3\] of batch 0 3 times"),
        ([FAILS], r"vLLM failed while it computes batch 0: EngineDeadError"),
        ([1] * 65, r"sample 0 has 65 tokens, and the engine takes 64"),
        ([HANGS], r"vLLM made no step for 1 s while it computes batch 0, and was ended; see .*log"),
        ([DIES], r"vLLM was killed by SIGKILL while it computes batch 0; see .*log"),
    ],
    ids=["aborts", "fails", "too long", "hangs", "dies"],
)
def test_a_failed_engine_is_named(
    target: VllmTarget, environment: Path, qwen3: Path, row: list[int], said: str
) -> None:
    ends = row[0] == DIES
    target = _start(environment, qwen3) if ends else target
    with pytest.raises(TargetError, match=said):
        target.features(host_batch([row, *ROWS]))
    if ends:
        target.close()


def test_the_first_error_of_a_start_is_named(environment: Path, qwen3: Path) -> None:
    with pytest.raises(TargetError, match="while it loads the target: ValueError: No available memory for the cache"):
        _start(environment, qwen3, no_room=True)


def test_vllm_that_is_missing_or_too_old_is_refused(environment: Path, qwen3: Path, tmp_path: Path) -> None:
    settings = TargetConfig(path=str(qwen3), engine="vllm", vllm_environment=str(environment))
    assert find_vllm(settings).version == "0.32.0"
    next(environment.rglob("example_hidden_states_connector.py")).unlink()
    with pytest.raises(TargetError, match=r"vllm 0\.32\.0\+cpu in .* cannot hand out hidden states"):
        find_vllm(settings)
    next(environment.rglob("METADATA")).unlink()
    with pytest.raises(TargetError, match=r"vllm is not installed in target\.vllm_environment"):
        find_vllm(settings)
    with pytest.raises(TargetError, match="no bin/python in there"):
        find_vllm(settings.model_copy(update={"vllm_environment": str(tmp_path)}))


def test_own_options_count_before_those_of_vllm(qwen3: Path) -> None:
    settings = TargetConfig(path=str(qwen3), engine="vllm", vllm={"tensor_parallel_size": 4})
    options = engine_options(settings, 128, 4096, "cuda:0+cuda:1")
    assert (options["tensor_parallel_size"], options["max_model_len"]) == (4, 128)
    assert engine_options(settings, None, 4096, "cpu")["max_model_len"] == 4097
    with pytest.raises(ValueError, match="enable_prefix_caching is set by paceline"):
        TargetConfig(path=str(qwen3), engine="vllm", vllm={"enable_prefix_caching": True})
