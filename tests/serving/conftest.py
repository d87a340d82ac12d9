"""Real vLLM in an environment of its own, tiny targets, and drafters that know the targets' own answers in part."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ENGINE_LIMIT_S = 300
"""An engine that takes longer is stuck; it takes a few seconds on a machine that is not loaded."""
PROMPT_LENGTHS = (3, 5, 9, 14, 20)


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Decodes prompts in one engine process; gives the answers and the engine's counters."""
    python = HERE.parent.parent / ".venv-vllm" / "bin" / "python"
    if not (python.parent.parent / "paceline-vllm.json").is_file():
        pytest.fail("no vLLM environment; make it with: make .venv-vllm")

    def run(**request: Any) -> dict[str, Any]:
        place = tmp_path_factory.mktemp("vllm")
        (place / "request.json").write_text(json.dumps(request))
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [python, HERE / "run_vllm.py", place],
            env=environment,
            capture_output=True,
            text=True,
            timeout=ENGINE_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"vLLM failed\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return json.loads((place / "answer.json").read_text())

    return run


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Random prompts."""
    source = random.Random(5)
    return [[source.randrange(4, 120) for _ in range(length)] for length in PROMPT_LENGTHS]
