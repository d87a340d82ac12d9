"""``paceline serve``: the command that starts vLLM or SGLang with a run's exported drafter; --run starts it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from paceline.cli import command
from paceline.errors import ConfigError, ExportError

DESCRIPTION = """Print the command that serves a run's target with its exported drafter, or start it.

The drafter is the folder in the run's `export` that was made from the latest step; `paceline export RUN` makes one.
With --run the server is started and waited for until it has answered a request; Ctrl-C ends it. Words behind -- are
flags of the engine.

Examples:
  paceline serve runs/first
  paceline serve runs/first --run --environment .venv-vllm -- --tensor-parallel-size 4
  paceline serve runs/first --run --plain --port 8001          # the target alone, to compare with
"""
STDERR = 2
"""File descriptor: what the server says goes there, so that standard output says only when it answers."""
POLL_S = 0.5
"""Between two looks at whether the server answers."""
END_S = 30.0
"""A server that was asked to end is killed after this."""


@dataclass
class Arguments:
    """What is served, and how."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Directory of the run."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """Which server."""
    run: bool = False
    """Start it, and wait until it answers."""
    plain: bool = False
    """The target without the drafter."""
    folder: Path | None = None
    """Folder of the drafter. Unset: the run's newest export."""
    target: str | None = None
    """Path or hub name of the target here. Unset: the run's; needed where an adapter was merged into it."""
    host: str = "127.0.0.1"
    """Where the server listens."""
    port: int = 8000
    """Where the server listens."""
    environment: Path | None = None
    """Virtual environment that the engine is installed in. Unset: the programs that the shell finds."""
    timeout_s: float = 1800.0
    """Longest wait for the first answer."""


def run(argv: Sequence[str]) -> int:
    """Print or start; exit code 1 where the server ends by itself."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    arguments, _ = command.parse(Arguments, argv[:end], prog="paceline serve", description=DESCRIPTION)
    words, notes = _words(arguments)
    words += argv[end + 1 :]
    from paceline.export.engines import command_line

    if not arguments.run:
        command.stdout.print(command_line(words), markup=False)
    for note in notes:
        command.stderr.print(note, markup=False)
    return _serve(words, arguments) if arguments.run else 0


def _words(arguments: Arguments) -> tuple[list[str], list[str]]:
    """The command, and what to know of it."""
    from paceline.checkpoint.run_directory import read_run_settings
    from paceline.drafter.spec import DrafterSpec
    from paceline.export.engines import MERGED, SGLANG, VLLM, ServedTarget, obstacles, serving_words
    from paceline.export.folder import newest_export, read_note
    from paceline.target_model.facts import describe_target

    settings = read_run_settings(arguments.source)
    engine = {"vllm": VLLM, "sglang": SGLANG}[arguments.engine]
    of_target = settings.target
    if arguments.target is not None:
        of_target = of_target.model_copy(update={"path": arguments.target, "adapter": None})
    target = ServedTarget.of(of_target, describe_target(of_target).model_type)
    if target.adapter is not None:
        raise ConfigError(
            f"target.adapter {target.adapter}: engines serve merged weights; save the merged model to a folder and "
            f"give that with --target ({MERGED} in the commands of `paceline export`)"
        )
    spec, folder = None, arguments.folder or newest_export(arguments.source)
    if not arguments.plain:
        if folder is None:
            raise ExportError(f"{arguments.source}: no exported drafter; first: paceline export {arguments.source}")
        note = read_note(folder)
        if "drafter" not in note:
            raise ExportError(f"{folder}: no folder that paceline exported (its paceline.json is missing)")
        spec = DrafterSpec.from_dict(note["drafter"])
        target = replace(target, embedding_scale=note["target"].get("embedding_scale", 1.0))
        if reason := obstacles(spec, note["format"], target).get(engine, ""):
            raise ExportError(f"{folder}: not for {engine}: {reason}")
    words = serving_words(engine, target.path, target, spec=spec, folder=str(folder))
    words += ["--dtype", of_target.dtype, "--host", arguments.host, "--port", str(arguments.port)]
    variables, notes = _template(settings), []
    if variables and engine == VLLM:
        words += ["--default-chat-template-kwargs", json.dumps(variables)]
    elif variables:
        notes.append(f"SGLang takes switches of the template with each request: chat_template_kwargs {variables}")
    if engine == SGLANG:
        words.append("--enable-metrics")
    return [*_program(words[0], arguments.environment), *words[1:]], notes


def _template(settings: Any) -> dict[str, Any]:
    """Variables of the chat template with which the drafter's chats were written."""
    from paceline.data.chat_template import Renderer
    from paceline.data.rows import Conversation
    from paceline.data.tokenizer import load_tokenizer

    if settings.data.thinking == "auto" and not settings.data.template_switches:
        return {}
    tokenizer = load_tokenizer(settings.target.path, settings.target.trust_remote_code)
    renderer = Renderer(tokenizer, settings.data.thinking, settings.data.template_switches)
    return dict(renderer.modes(Conversation([]), None)[0])


def _program(name: str, environment: Path | None) -> list[str]:
    """The engine's program, in its environment where one is given."""
    if environment is None:
        return [name]
    path = environment / "bin" / name
    if not path.is_file():
        raise ConfigError(
            f"--environment {environment}: no bin/{name} in there; give the folder of a virtual environment"
        )
    return [str(path)]


def _serve(words: list[str], arguments: Arguments) -> int:
    """Start the server, say when it answers, and end it with this command."""
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]}: not found; give the virtual environment that it is in with --environment")
    with socket.socket() as probe:
        if probe.connect_ex((arguments.host, arguments.port)) == 0:
            raise ConfigError(f"--port {arguments.port}: a program listens there already; give another port")
    command.stderr.print(shlex.join(words), markup=False)
    # In its own group, so that Ctrl-C reaches it through this command only.
    server = subprocess.Popen(words, stdout=STDERR, start_new_session=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        name = _first_answer(server, arguments)
        url = f"http://{arguments.host}:{arguments.port}"
        command.stdout.print(f"{url} answers, with the model {name}; Ctrl-C ends it", markup=False)
        sys.stdout.flush()
        raise _ended(server.wait())
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)
        _end(server)


def _first_answer(server: subprocess.Popen[bytes], arguments: Arguments) -> str:
    """Wait until the server has answered one token; gives its name of the model.

    Raises:
        ExportError: it ended, or did not answer in time.
    """
    from paceline.errors import DataError
    from paceline.evaluate.server_client import MeasuredServer

    client = MeasuredServer(f"http://{arguments.host}:{arguments.port}", timeout_s=arguments.timeout_s)
    deadline = time.monotonic() + arguments.timeout_s
    try:
        while not client.healthy():
            if server.poll() is not None:
                raise _ended(server.returncode)
            if time.monotonic() > deadline:
                raise ExportError(f"{client.url}: no answer in {arguments.timeout_s:g} s; see its lines above")
            time.sleep(POLL_S)
        name = client.model().name
        client.answer(name, [0], 1)
        return name
    except DataError as error:
        raise ExportError(*error.errors) from error
    finally:
        client.close()


def _ended(code: int) -> ExportError:
    return ExportError(f"the server ended with exit code {code}; see its lines above")


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ask it to end; kill its whole group where it does not."""
    if server.poll() is not None:
        return
    server.terminate()
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
