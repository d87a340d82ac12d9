"""Losses of single micro-batches, in a file and in the trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from paceline.cli import main
from paceline.errors import RunDirectoryError
from paceline.observe.micro_batch_file import MicroBatchFile
from small_runs import few_chats, make_run, shared_store

__all__ = ["few_chats", "make_run", "shared_store"]


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_the_weighted_mean_of_its_micro_batches(make_run: Callable[..., Path]) -> None:
    settings = make_run(train={"max_steps": 4}, observe={"micro_batches": True, "trace": True}, plan={"accumulate": 3})
    assert main(["train", str(settings)]) == 0
    run_dir = Path(yaml.safe_load(settings.read_text())["run_dir"])
    found = lines_of(run_dir / "micro_batches.jsonl")
    steps = [line for line in lines_of(run_dir / "metrics.jsonl") if line["kind"] == "step"]
    for step in steps:
        mine = [line for line in found if line["step"] == step["step"]]
        assert [line["batch"] for line in mine] == step["batches"] and len(mine) == 3
        weight = sum(line["weight"] for line in mine)
        mean = sum(line["loss"] * line["weight"] for line in mine) / weight
        assert mean == pytest.approx(step["values"]["loss"], rel=1e-5)
        assert sum(line["samples"] for line in mine) == step["values"]["window/samples"]
    trace = json.loads((run_dir / "trace.json").read_text())
    shown = [event["args"] for event in trace if event["name"] == "step 2" and event["ph"] == "X"]
    assert list(shown[0]["micro_batch_losses"].values()) == [line["loss"] for line in found if line["step"] == 2]


def test_what_is_behind_the_checkpoint_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "micro_batches.jsonl"
    path.write_text('{"step": 1, "batch": 0}\n{"step": 2, "batch": 1}\n{"step": 3, "batch": 2}\n{"step": 4, "ba')
    MicroBatchFile(path, 2).close()
    assert [line["step"] for line in lines_of(path)] == [1, 2]
    path.write_text("something\nelse\n")
    with pytest.raises(RunDirectoryError, match="not a file of micro-batches"):
        MicroBatchFile(path, 2)
