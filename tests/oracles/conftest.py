"""The environment of the published packages, a tiny target on disk, and drafters fitted to its own greedy answers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from oracles.oracle_cases import (
    ANSWER_TOKENS,
    FIT_STEPS,
    HIDDEN,
    KINDS,
    LAYERS,
    PROMPTS,
    VOCABULARY,
    fit,
    load,
    make_spec,
)
from paceline.drafter.network import Drafter

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], Path]:
    """Runs one of the scripts of this folder in the oracle environment; gives the folder with its answers."""
    folder = Path(os.environ.get("PACELINE_ORACLE_VENV") or HERE.parent.parent / ".venv-oracle")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (folder / "paceline-oracles.json").is_file():
        reason = f"no oracle environment in {folder}; make it with: python scripts/oracle_env.py"
        if os.environ.get("PACELINE_REQUIRE_ORACLES"):
            pytest.fail(reason)
        pytest.skip(reason)

    def run(script: str, request: dict[str, Any]) -> Path:
        place = tmp_path_factory.mktemp("oracle")
        (place / "request.json").write_text(json.dumps(request))
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [python, HERE / script, place], env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, f"{script} failed\n{done.stdout}\n{done.stderr}"
        return place

    return run


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 target, wide enough in its weights that its greedy answers wander."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("target")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def answers(target_folder: Path) -> list[list[int]]:
    """Each prompt with the target's own greedy answer, computed in float64 without a cache."""
    model = load(target_folder, "float64").model
    rows = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(ANSWER_TOKENS):
            row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
        rows.append(row)
    assert all(len(set(row)) > 12 for row in rows), "the answers must wander, or wrong drafters would be accepted too"
    return rows


@pytest.fixture(scope="session")
def fitted(target_folder: Path, answers: list[list[int]]) -> dict[str, Drafter]:
    """A drafter of every kind that knows the answers in part, so that accepted lengths vary."""
    target = load(target_folder, "float32")
    return {kind: fit(make_spec(kind), target, answers, steps=FIT_STEPS) for kind in KINDS}
