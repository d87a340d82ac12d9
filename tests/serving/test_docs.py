"""The commands of docs/serving.md, in their order, on a small run and with real servers."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.checkpoint.run_directory import read_evaluations
from processes import free_port

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]


def commands(project: Path) -> list[str]:
    """Lines of the page that are commands of paceline, but for the one that uploads."""
    lines = (project / "docs" / "serving.md").read_text().splitlines()
    found = [line.strip().partition("  #")[0] for line in lines if line.startswith("    paceline ")]
    return [line for line in found if "--push" not in line]


def test_the_commands_of_the_page(project, run_dir, programs, environment, demo_assets, tmp_path) -> None:
    shutil.copytree(run_dir, tmp_path / "runs" / "first", ignore=shutil.ignore_patterns("export"))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "target").symlink_to(run_dir.parent / "target")
    (tmp_path / ".venv-vllm").symlink_to(programs.parent)
    question = json.loads((demo_assets / "heldout.jsonl").read_text().partition("\n")[0])["messages"][:1]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": question}) + "\n")
    ports = {8000: free_port(), 8001: free_port()}
    variables = {**environment, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    words = [shlex.split(line) for line in commands(project)]
    assert {asked[1] for asked in words} == {"export", "serve", "evaluate", "regenerate"}
    with ExitStack() as stack:
        for asked in words:
            for shown, port in ports.items():
                asked = [word.replace(str(shown), str(port)) for word in asked]
            if "--run" in asked and "--port" not in asked:
                place = asked.index("--run")
                asked = [*asked[:place], "--port", str(ports[8000]), *asked[place:]]
            run = [sys.executable, "-m", "paceline", *asked[1:]]
            if "--run" not in asked:
                done = subprocess.run(run, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
                assert done.returncode == 0, (asked, done.stderr[-3000:])
                continue
            log = stack.enter_context((tmp_path / f"log-{len(asked)}").open("w"))
            server = subprocess.Popen(run, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=log, text=True)
            stack.callback(server.wait, 60)
            stack.callback(server.terminate)
            assert server.stdout is not None
            stack.enter_context(server.stdout)
            assert "answers, with the model" in server.stdout.readline(), Path(log.name).read_text()[-3000:]
    (measured,) = {
        entry["conditions"]["baseline"] for entry in read_evaluations(tmp_path / "runs" / "first", "servers")
    } - {False}
    assert measured is True and (tmp_path / "answers.jsonl").read_text().count("\n") == 1
