"""The command line's frame: help without torch, misuse in one line."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from paceline.cli import COMMANDS, command, main
from paceline.errors import NOT_TRAINED, ConfigError, Interrupted, StageError


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_names_an_example_and_imports_no_torch(command: str | None) -> None:
    words = ["--help"] if command is None else [command, "--help"]
    script = (
        "import sys\n"
        "from paceline.cli import main\n"
        "try:\n"
        f"    code = main({words!r})\n"
        "except SystemExit as done:\n"
        "    code = done.code\n"
        "assert not code, code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("paceline " + command if command else "commands:") in done.stdout


def test_every_command_has_a_module_with_run() -> None:
    for name in COMMANDS:
        assert callable(importlib.import_module(f"paceline.cli.{name}").run)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, ""),
        (["trian"], 2, "trian: unknown command; did you mean train?"),
        (["train", "a.yaml", "--optimizer.lr"], 2, "--optimizer.lr: no value given"),
        (["train", "a.yaml", "--sed", "1"], 2, "--sed: unknown flag; did you mean seed?"),
        (["train", "a.yaml", "b.yaml"], 2, "b.yaml: unexpected argument"),
        (["train", "nowhere.yaml"], 2, "nowhere.yaml: no such settings file"),
        (["report", "x", "--seed", "1"], 2, "--seed: unknown flag; see `paceline report --help`"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(
    words: list[str], code: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    assert says in capfd.readouterr().err


def test_errors_and_interrupts_become_lines_and_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    def two_errors(_: object) -> int:
        raise ConfigError("a.yaml:1: [first] error", "a.yaml:2: second error")

    def failed(_: object) -> int:
        raise StageError("stage target 0 failed")

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    assert command.guarded(two_errors, []) == 2
    assert command.guarded(failed, []) == 1

    def stopped(_: object) -> int:
        raise Interrupted(NOT_TRAINED)

    assert command.guarded(interrupted, []) == 130
    assert command.guarded(stopped, []) == 130
    lines = capfd.readouterr().err.splitlines()
    assert lines[:3] == [
        "error: a.yaml:1: [first] error",
        "error: a.yaml:2: second error",
        "error: stage target 0 failed",
    ]
    assert lines[3].startswith("interrupted")
    assert lines[4].startswith("stopped while starting: nothing was trained")


def test_errors_pickle_with_their_errors() -> None:
    import pickle

    from paceline import errors

    for name in dir(errors):
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, errors.PacelineError):
            again = pickle.loads(pickle.dumps(kind("a", "b")))
            assert type(again) is kind and again.errors == ("a", "b") and again.exit_code == kind.exit_code


def test_a_error_of_the_place_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def full(argv: object) -> int:
        raise OSError(28, "No space left on device", "runs/first/metrics.jsonl")

    assert command.guarded(full, []) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "error: runs/first/metrics.jsonl: No space left on device; fix that, then run the command again",
    ]


def test_control_characters_of_data_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def binary(argv: object) -> int:
        raise ConfigError("bin.jsonl:1: \x1b[2Jnot \x00 JSON, naïve 中文 🙂")

    assert command.guarded(binary, []) == 2
    assert capsys.readouterr().err == "error: bin.jsonl:1: \\x1b[2Jnot \\x00 JSON, naïve 中文 🙂\n"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("demo",)])
def test_a_missing_argument_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("error: ") and shown.count("\n") == 0


def test_settings_are_explained_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help", "optimizer"])
    section = capsys.readouterr().out
    assert "--optimizer.lr" in section and "--plan.strategy" not in section
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    assert {"--optimizer.lr", "--plan.strategy", "--seed"} <= set(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    assert len(capsys.readouterr().out.splitlines()) < 40
