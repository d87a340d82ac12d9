"""`paceline serve`: the command that it prints, and a server that it starts, which is a stand-in here."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.checkpoint.checkpoints import write_checkpoint
from paceline.checkpoint.run_directory import open_run
from paceline.cli import main
from paceline.config import Settings
from paceline.drafter.network import Drafter
from paceline.drafter.spec import derive_spec
from paceline.export.folder import newest_export
from paceline.target_model.facts import describe
from processes import free_port


def make_run(place: Path, target: Path, *, adapter: Path | None = None, **data: object) -> Path:
    settings = Settings.model_validate(
        {
            "run_dir": str(place / "run"),
            "target": {"path": str(target), "taps": [1, 5], "adapter": adapter and str(adapter)},
            "drafter": {"num_layers": 1, "block_size": 4},
            "data": data,
        }
    )
    facts = describe(str(target))
    spec = derive_spec(settings.drafter, facts, [1, 5], 3)
    folder = open_run(settings, {"drafter": spec.to_dict(), "target": dict(facts.identity)})
    write_checkpoint(folder, 10, {"network": Drafter(spec).state_dict()}, keep_last=1)
    return folder


@pytest.fixture
def exported(tmp_path: Path, demo_assets: Path, capsys) -> Path:
    folder = make_run(tmp_path, demo_assets / "target")
    assert main(["export", str(folder), "--golden", "none"]) == 0
    capsys.readouterr()
    return folder


def printed(capsys, *words: str) -> list[str]:
    assert main(["serve", *words]) == 0
    return [word for word in shlex.split(capsys.readouterr().out) if word.strip()]


def test_the_command_of_each_engine(exported, demo_assets, capsys) -> None:
    target, folder = str(demo_assets / "target"), str(exported / "export" / "zlab")
    words = printed(capsys, str(exported), "--port", "8123", "--", "--tensor-parallel-size", "4")
    assert words[:3] == ["vllm", "serve", target] and words[-2:] == ["--tensor-parallel-size", "4"]
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative == {"method": "dflash", "model": folder, "num_speculative_tokens": 3}
    assert words[words.index("--dtype") + 1] == "bfloat16" and words[words.index("--port") + 1] == "8123"
    words = printed(capsys, str(exported), "--engine", "sglang")
    assert words[words.index("--speculative-draft-model-path") + 1] == folder and "--enable-metrics" in words
    assert "--speculative-config" not in printed(capsys, str(exported), "--plain")


def test_switches_of_the_template_are_the_servers_defaults(tmp_path, demo_assets, capsys) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for path in (demo_assets / "target").iterdir():
        (target / path.name).symlink_to(path)
    (target / "chat_template.jinja").unlink()
    text = (demo_assets / "target" / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").write_text(text + "{%- if enable_thinking is false -%}{{ 'no' }}{%- endif -%}")
    folder = make_run(tmp_path, target, thinking="off")
    words = printed(capsys, str(folder), "--plain")
    assert json.loads(words[words.index("--default-chat-template-kwargs") + 1]) == {"enable_thinking": False}
    assert main(["serve", str(folder), "--plain", "--engine", "sglang"]) == 0
    assert "chat_template_kwargs {'enable_thinking': False}" in capsys.readouterr().err


def test_what_cannot_be_served_is_one_line(tmp_path, demo_assets, exported, capsys) -> None:
    def said(*words: str) -> str:
        assert main(["serve", *words]) != 0
        err = capsys.readouterr().err.strip()
        assert len(err.splitlines()) == 1
        return err

    bare = make_run(tmp_path / "bare", demo_assets / "target")
    assert newest_export(bare) is None and f"first: paceline export {bare}" in said(str(bare))
    assert "no folder that paceline exported" in said(str(exported), "--folder", str(demo_assets))
    assert "no bin/vllm in there" in said(str(exported), "--environment", str(tmp_path))
    assert "no run here" in said(str(tmp_path))


def stand_in(place: Path, line: str) -> Path:
    """An environment whose `vllm` is a line of shell."""
    program = place / "environment" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{line}\n")
    program.chmod(0o755)
    return place / "environment"


def test_a_server_is_waited_for_and_ended(exported, tmp_path, project) -> None:
    port = free_port()
    program = project / "tests" / "evaluate" / "counting_server.py"
    environment = stand_in(tmp_path, f'exec {sys.executable} {program} "$@"')
    words = ["serve", str(exported), "--run", "--environment", str(environment), "--port", str(port)]
    with subprocess.Popen([sys.executable, "-m", "paceline", *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"http://127.0.0.1:{port} answers, with the model target; Ctrl-C ends it\n"
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server has ended too"


def test_a_server_that_ends_by_itself_is_one_line(exported, tmp_path, capsys) -> None:
    words = ["serve", str(exported), "--run", "--environment", str(stand_in(tmp_path, "exit 3"))]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        assert main([*words, "--port", str(port)]) == 2
        assert "a program listens there already" in capsys.readouterr().err
    assert main([*words, "--port", str(port)]) == 1
    assert "the server ended with exit code 3" in capsys.readouterr().err


def test_a_folder_that_the_engine_serves_otherwise_is_refused(exported, capsys) -> None:
    path = exported / "export" / "zlab" / "paceline.json"
    note = json.loads(path.read_text())
    assert note["target"]["embedding_scale"] == 1.0
    note["target"]["embedding_scale"] = 9.5
    path.write_text(json.dumps(note))
    assert main(["serve", str(exported)]) == 1
    said = capsys.readouterr()
    assert not said.out and "not for vLLM: vLLM drops the scale of the target's embedding; export with" in said.err
