"""The command line: one thin file a command; the module of a command is imported only when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": "the whole path on an embedded small target: prepare, plan, train, evaluate, export, report",
    "prepare": "chats to a tokenized store with loss masks and lengths",
    "regenerate": "answers to prompts by the target itself",
    "plan": "dry run: buckets, padding, windows",
    "check": "pre-flight of one run: target, data, memory, time; each line passes, warns or fails",
    "train": "train a drafter, or resume a run",
    "fork": "a new run that continues from a checkpoint of another one, with other settings",
    "signal": "ask a run that trains for a checkpoint, or to stop",
    "status": "where a run is: step, time left, speed, last warnings, next checkpoint",
    "evaluate": "decode held-out prompts speculatively and measure acceptance length",
    "chat": "answer a prompt of yours with accepted drafts in color, and the speed with and without the drafter",
    "export": "drafter folder for SGLang, vLLM and z-lab dflash",
    "serve": "the command that serves target and drafter with vLLM or SGLang, or a server that it starts",
    "report": "one HTML file that explains a run",
}


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: paceline COMMAND [ARGUMENTS]\n\n"
        "Trains DFlash drafters: small models that draft a block of tokens at once,\n"
        "which your language model verifies in one pass.\n\n"
        f"commands:\n{rows}\n\n"
        "`paceline COMMAND --help` explains one with an example. First look: `paceline demo`.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 misused, 130 interrupted."""
    # Where a machine is gone, torch's C++ side would print stack traces beside the one line that says so.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted before anything was done\n")
        return 130


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from paceline.version import __version__

        sys.stdout.write(f"paceline {__version__}\n")
        return 0
    from paceline.cli import command

    if words[0] not in COMMANDS:
        from paceline.config import suggestion

        command.show_error(f"{words[0]}: unknown command; {suggestion(words[0], list(COMMANDS))}")
        return 2
    module = importlib.import_module(f"paceline.cli.{words[0]}")
    return command.guarded(module.run, words[1:])
