"""Random and mad input of every kind: one line of error or a value, never another exception.

`make fuzz` runs the same with more examples.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file

from paceline.cli import command, main
from paceline.config import load_settings
from paceline.data.rows import Conversation, PlainText, ReadyTokens, RowRejected, read_row
from paceline.errors import ConfigError, ExportError, PacelineError, PlanError
from paceline.export.formats import read_drafter
from paceline.plan.lengths_file import LengthsFile, read_lengths
from paceline.terminal import PlainConsole

EXAMPLES = int(os.environ.get("PACELINE_FUZZ", "60"))
fuzzed = settings(
    max_examples=EXAMPLES,
    derandomize="PACELINE_FUZZ" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
SCRAPS = ("run_dir: r\n", "target:\n  path: t\n", "*a", "&a ", "[", "]", "{", "}", ": ", "- ", "2024-13-45", "0x", "!!")
DEEP = "[" * 100_000


NAMES = "abcdefghijklmnopqrstuvwxyz"
BOMB = "a: &a [x,x]\n" + "".join(f"{b}: &{b} [*{a},*{a}]\n" for a, b in itertools.pairwise(NAMES))
"""Some hundred bytes that stand for 67 million values."""


def one_line_each(error: PacelineError) -> None:
    assert error.errors and all(line and "\n" not in line for line in error.errors), error.errors


@fuzzed
@given(st.lists(st.sampled_from(SCRAPS) | st.text(max_size=5), max_size=12).map("".join))
@example("a: " + DEEP[:1500])
@example("a: &a [*a]")
@example("run_dir: 2024-13-45")
@example(
    "a: &a [x,x]\n" + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)},*{chr(97 + n)}]\n" for n in range(24))
)
def test_settings_files(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        load_settings(path)
    except ConfigError as error:
        one_line_each(error)
        assert any(str(path) in line for line in error.errors)


@fuzzed
@given(st.text(min_size=1))
@example("123")
@example("2024-13-45")
@example("a #b")
@example("[x")
def test_flags_of_type_text_are_taken_as_they_are(text: str) -> None:
    if text != "null":
        try:
            found = load_settings(None, {"run_dir": text, "target.path": "t"})
        except ConfigError as error:
            one_line_each(error)
        else:
            assert found.run_dir == text


@fuzzed
@given(VALUES | st.dictionaries(st.sampled_from(["messages", "conversations", "prompt", "input_ids", "tools"]), VALUES))
def test_rows(value: Any) -> None:
    with contextlib.suppress(RowRejected):
        assert isinstance(read_row(value), (Conversation, PlainText, ReadyTokens))


def npy(header: str, body: bytes = b"") -> bytes:
    text = header.encode("latin1", "replace") + b"\n"
    return b"\x93NUMPY\x01\x00" + (len(text) % 65536).to_bytes(2, "little") + text + body


@fuzzed
@given(st.sampled_from([".npy", ".npz", ".jsonl", ".txt", ".parquet"]), st.binary(max_size=60))
@example(".npy", npy("{'descr': '<i8', 'fortran_order': False, 'shape': (10**15,), }"))
@example(".npy", npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,), }"))
@example(".npy", npy("{'descr': 'O', 'fortran_order': False, 'shape': (1,), }"))
@example(".npy", npy("(" * 300))
@example(".jsonl", DEEP.encode())
@example(".txt", b"1\x002")
def test_lengths_files(tmp_path_factory: pytest.TempPathFactory, kind: str, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzz{kind}"
    path.write_bytes(content)
    try:
        found = read_lengths(path)
    except PlanError as error:
        one_line_each(error)
    else:
        assert isinstance(found, LengthsFile)


@fuzzed
@given(st.text())
@example("[/x]")
@example(":x: [bold]")
@example("\x1b]0;title\x07")
def test_text_of_users_on_the_console(text: str) -> None:
    for console in (PlainConsole(stderr=True), PlainConsole()):
        console.file = io.StringIO()
        console.print(command.escape(text))
        console.print(text, markup=False)
        assert "\x1b]" not in console.file.getvalue()
    assert isinstance(PlainConsole(), Console)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, make_pair: Any) -> Path:
    from paceline.export.zlab import write_zlab

    _, network = make_pair("qwen3", dtype="float32")
    folder = tmp_path_factory.mktemp("drafter")
    write_zlab(folder, network.spec, network.state_dict(), dtype="float32")
    return folder


@pytest.mark.parametrize("what", ["shape", "type", "NaN", "cut", "bytes", "deep", "no object", "missing", "NUL"])
def test_drafter_folders(drafter: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(drafter, tmp_path / "drafter"))
    weights = next(folder.glob("*.safetensors"))
    tensors = load_file(weights)
    name = next(iter(tensors))
    if what == "shape":
        save_file({**tensors, name: torch.zeros(3, 5)}, weights)
    elif what == "type":
        save_file({**tensors, name: tensors[name].to(torch.int32)}, weights)
    elif what == "NaN":
        save_file({**tensors, name: torch.full_like(tensors[name], float("nan"))}, weights)
    elif what == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "bytes":
        weights.write_bytes(np.random.default_rng(0).bytes(500))
    elif what == "deep":
        (folder / "config.json").write_text(DEEP)
    elif what == "no object":
        (folder / "config.json").write_text(json.dumps([1]))
    elif what == "missing":
        save_file({key: value for key, value in tensors.items() if key != name}, weights)
    elif what == "NUL":
        assert main(["evaluate", "a\0b", "--target", "t", "--prompts", "p"]) in (1, 2)
        assert "Traceback" not in capsys.readouterr().err
        return
    with pytest.raises(ExportError) as caught:
        read_drafter(folder)
    one_line_each(caught.value)
