"""Features out of real vLLM: documents cut into chunks, preempted, aborted and asked for again lose no token."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch

from batches import host_batch
from paceline.config import TargetConfig
from paceline.target_model.engine_proof import prove_engine
from paceline.target_model.load import load_target
from paceline.target_model.vllm_side.paceline_memory import HEADER_BYTES, SharedStates
from paceline.target_model.vllm_target import SIDE, engine_options, extraction
from paceline.types import FeatureBatch

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]
LENGTHS = (200, 17, 350, 64, 129, 511, 1, 300)


def test_no_token_is_lost_or_doubled(
    programs: Path, environment: dict[str, str], demo_assets: Path, tmp_path: Path
) -> None:
    source = random.Random(3)
    rows = [[source.randrange(4, 1000) for _ in range(length)] for length in LENGTHS]
    target = load_target(TargetConfig(path=str(demo_assets / "target"), dtype="float32"), [0, 2])
    tokens, hidden = sum(LENGTHS), target.facts.hidden_size
    memory = tmp_path / "memory"
    memory.write_bytes(b"")
    os.truncate(memory, HEADER_BYTES + tokens * 3 * hidden * 4)
    settings = TargetConfig(
        path=str(demo_assets / "target"),
        dtype="float32",
        engine="vllm",
        vllm={
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "long_prefill_token_threshold": 16,
            "num_gpu_blocks_override": 20,
            "scheduler_reserve_full_isl": False,  # else no prompt is preempted
            "block_size": 32,
            "disable_log_stats": False,
        },
    )
    starts = [sum(LENGTHS[:place]) for place in range(len(LENGTHS))]
    documents = [
        {"ids": row, "document": place, "ticket": 1, "first_token": start}
        for place, (row, start) in enumerate(zip(rows, starts, strict=True))
    ]
    layers = [1, 3, target.facts.num_layers]
    options = engine_options(settings, None, max(LENGTHS), "cpu") | extraction(layers, str(memory), "float32")
    (tmp_path / "request.json").write_text(json.dumps({"options": options, "documents": documents}))
    words = [programs / "python", Path(__file__).with_name("engine_requests.py"), tmp_path]
    variables = {**environment, "PYTHONPATH": str(SIDE)}
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(words, env=variables, stdout=log, stderr=log, timeout=400, check=False)
    assert done.returncode == 0, (tmp_path / "log").read_text()[-5000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert -1 in found["marks"], "some were aborted"
    assert found["preempted"] > 0
    assert found["steps"] >= tokens / 64, "documents were computed in chunks"
    states = SharedStates(str(memory)).states(0, (tokens, 3, hidden), torch.float32)
    host = host_batch(rows)
    for place, row in enumerate(rows):  # each alone, all of its tokens
        part = states[starts[place] : starts[place] + len(row)]
        batch = FeatureBatch(host_batch([row]), part[:, :2].reshape(len(row), -1), part[:, 2])
        if len(row) > 1:
            prove_engine(target, batch, "vllm")
    whole = target.features(host, with_last=True)
    assert torch.allclose(whole.features, states[:, :2].reshape(tokens, -1), rtol=1e-4, atol=1e-3)
