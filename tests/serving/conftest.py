"""Real vLLM in an environment of its own, tiny targets, and drafters that know the targets' own answers in part."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest

from oracles.oracle_cases import fit
from paceline.checkpoint.checkpoints import write_checkpoint
from paceline.checkpoint.run_directory import open_run
from paceline.cli import main
from paceline.config import Settings
from paceline.decode.loop import greedy_decode
from paceline.drafter.spec import derive_spec
from paceline.evaluate.prompts import PromptRenderer, render_prompts
from paceline.target_model.load import load_target
from processes import free_port
from small_runs import few_chats, make_run, shared_store
from tiny_targets import SMALL, save_tiny

__all__ = ["few_chats", "make_run", "shared_store"]

HERE = Path(__file__).parent
SERVED = {"vocab_size": 2048, "max_position_embeddings": 1024, "eos_token_id": 2}
"""As the demo's tokenizer needs it."""
SWITCH = "{%- if add_generation_prompt and enable_thinking is false -%}{{ 'No thoughts.\\n' }}{%- endif -%}"
MORE = ("--enforce-eager", "--max-model-len", "1024")
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


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory, demo_assets: Path) -> Path:
    """A run of a random target with the demo's tokenizer, whose template has a switch for thinking; its drafter learned
    two answers and is exported."""
    place = tmp_path_factory.mktemp("served")
    target = save_tiny(place / "target", "qwen3", seed=3, **{**SMALL, **SERVED})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_assets / "target" / name, target / name)
    with (target / "chat_template.jinja").open("a") as template:
        template.write(SWITCH)
    settings = Settings.model_validate(
        {
            "run_dir": str(place / "run"),
            "target": {"path": str(target), "taps": [0, 2], "dtype": "float32"},
            "data": {"heldout": [str(demo_assets / "heldout.jsonl")], "thinking": "off"},
            "drafter": {"num_layers": 2, "block_size": 8},
            "evaluate": {"num_prompts": 2, "max_new_tokens": 24, "dtype": "float32", "concurrency": [1, 4]},
        }
    )
    model = load_target(settings.target, (0, 2))
    prompts = render_prompts(settings.data.heldout, PromptRenderer(str(target), "off"), 2)
    rows = [[*prompt.ids, *greedy_decode(model, prompt.ids, max_new_tokens=40).ids] for prompt in prompts]
    spec = derive_spec(settings.drafter, model.facts, [0, 2], 3)
    facts = {
        "drafter": spec.to_dict(),
        "target": dict(model.facts.identity),
        "target_fingerprint": model.facts.fingerprint,
        "data_fingerprint": "d" * 64,
        "total_steps": 40,
    }
    folder = open_run(settings, facts)
    write_checkpoint(folder, 40, {"network": fit(spec, model, rows, 40).state_dict()}, keep_last=1)
    assert main(["export", str(folder), "--dtype", "float32"]) == 0
    return folder


@pytest.fixture(scope="session")
def serving(
    programs: Path, environment: dict[str, str], run_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """A context: `paceline serve --run` with further words, until it answers; gives its process, address and log."""

    @contextmanager
    def serve(*words: str, port: int | None = None) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
        port, log = port or free_port(), tmp_path_factory.mktemp("serve") / "log"
        asked = ["serve", str(run_dir), "--run", "--environment", str(programs.parent), "--port", str(port), *words]
        path = os.environ.get("PYTHONPATH")
        variables = {**environment, **({"PYTHONPATH": path} if path else {})}
        with (
            log.open("w") as said,
            subprocess.Popen(
                [sys.executable, "-m", "paceline", *asked, "--", *MORE],
                env=variables,
                stdout=PIPE,
                stderr=said,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            try:
                answered = process.stdout.readline()
                assert "answers, with the model" in answered, log.read_text()[-6000:]
                yield process, answered.split()[0], log
            finally:
                process.terminate()
                process.wait(60)

    return serve


@pytest.fixture(scope="session")
def server(serving: Callable[..., Any]) -> Iterator[str]:
    """Address of vLLM with the run's drafter."""
    with serving() as (_, url, _):
        yield url


@pytest.fixture(scope="session")
def plain_server(serving: Callable[..., Any]) -> Iterator[str]:
    """Address of vLLM with the run's target alone."""
    with serving("--plain") as (_, url, _):
        yield url
