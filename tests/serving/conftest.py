"""Real vLLM in an environment of its own, tiny targets, and drafters that know the targets' own answers in part."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest

HERE = Path(__file__).parent
PROMPT_LENGTHS = (3, 5, 9, 14, 20)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Variables for vLLM: one thread, a small cache, no network."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def programs() -> Path:
    """Folder of the programs of vLLM's environment."""
    folder = HERE.parent.parent / ".venv-vllm"
    if not (folder / "paceline-vllm.json").is_file():
        pytest.fail("no vLLM environment; make it with: make .venv-vllm")
    return folder / "bin"


@pytest.fixture(scope="session")
def vllm(
    programs: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Decodes prompts in one engine process; gives the answers and the engine's counters."""
    # In one process with its engine, so that a fork has nothing more to import.
    words, variables = (
        [programs / "python", HERE / "run_vllm.py"],
        {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    with subprocess.Popen(words, env=variables, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True) as engines:

        def run(**request: Any) -> dict[str, Any]:
            assert engines.stdin is not None and engines.stdout is not None
            place = tmp_path_factory.mktemp("vllm")
            (place / "request.json").write_text(json.dumps(request))
            engines.stdin.write(f"{place}\n")
            engines.stdin.flush()
            code = engines.stdout.readline().strip()
            assert code == "0", f"vLLM failed\n{(place / 'log').read_text()[-6000:]}"
            return json.loads((place / "answer.json").read_text())

        yield run


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Random prompts."""
    source = random.Random(5)
    return [[source.randrange(4, 120) for _ in range(length)] for length in PROMPT_LENGTHS]
