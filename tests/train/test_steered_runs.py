"""Runs whose settings change on the way, and runs that are forked: the real commands on the embedded target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from paceline.checkpoint import checkpoints, run_directory
from paceline.checkpoint.changes import read_changes
from paceline.cli import main
from paceline.config import OptimizerConfig
from paceline.drafter.network import Drafter
from paceline.drafter.optimizer import learning_rates
from paceline.run.learner_factory import learner_factory
from paceline.target_model.shared_weights import load_shared_weights
from small_runs import built

MakeRun = Callable[..., Path]
FIRST: dict[str, Any] = {
    "train": {"max_steps": 6},
    "checkpoint": {"every_steps": 3, "keep_last": 9},
    "plan": {"strategy": "shuffled", "schedule": "shuffled", "accumulate": 1, "token_budget": 700},
}
THEN: dict[str, Any] = {
    "train": {"max_steps": 14},
    "checkpoint": {"every_steps": 3, "keep_last": 9},
    "plan": {"strategy": "grid", "schedule": "stratified", "accumulate": 2, "token_budget": 1024},
    "optimizer": {"lr": 5e-4, "warmup": 0.0},
    "objective": {"gamma": 2.0},
    "drafter": {"noise": {"kind": "gaussian", "ratio": 0.1}},
}


def run_dir_of(settings: Path) -> Path:
    return Path(yaml.safe_load(settings.read_text())["run_dir"])


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoints.checkpoint_path(run_dir, step) / checkpoints.WEIGHTS)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def lines_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def steered(make_run: MakeRun, name: str, **more: Any) -> Path:
    """A run with the first settings to step 6, then with the others to step 14; gives its settings file."""
    assert main(["train", str(make_run(name, **FIRST, **more))]) == 0
    settings = make_run(name, **THEN, **more)
    assert main(["train", str(settings), "--yes"]) == 0
    return settings


def test_a_run_goes_on_with_other_settings(make_run: MakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(make_run(**FIRST))]) == 0
    settings = make_run(**THEN)
    run_dir, before = run_dir_of(settings), (run_dir_of(settings) / "settings.yaml").read_bytes()
    capfd.readouterr()
    assert main(["train", str(settings)]) == 2
    said = capfd.readouterr().err.splitlines()
    assert "from step 7 on: plan.strategy 'shuffled' → 'grid'" in said
    assert said[-1].endswith("settings of this run have changed since its last start; add --yes to go on so")
    assert (run_dir / "settings.yaml").read_bytes() == before and checkpoints.newest_step(run_dir) == 6

    assert main(["train", str(settings), "--yes"]) == 0
    (change,) = read_changes(run_dir)
    assert change.step == 6 and change.changed["optimizer.lr"] == (1e-3, 5e-4)
    assert run_directory.read_run_facts(run_dir)["total_steps"] == 14
    (event,) = [line for line in lines_of(run_dir, "event") if line["event"] == "settings"]
    assert event["step"] == 6 and event["fields"]["plan.accumulate"] == "1 → 2"
    lines = lines_of(run_dir, "step")
    assert [line["step"] for line in lines] == list(range(1, 15))
    rates = learning_rates(OptimizerConfig(lr=5e-4, warmup=0.0), 14)
    assert [line["values"]["learning_rate"] for line in lines[6:]] == [rates.at(step) for step in range(6, 14)]
    assert {line["values"]["schedule/noise_ratio"] for line in lines[6:]} == {0.1}
    # Started again it is the same run, and asks nothing.
    capfd.readouterr()
    assert main(["train", str(run_dir)]) == 0
    assert "from step" not in capfd.readouterr().err and len(read_changes(run_dir)) == 1


def test_no_sample_is_trained_twice_in_the_epoch_of_a_change(make_run: MakeRun) -> None:
    settings = steered(make_run, "run")
    run = built(settings)
    trained: dict[int, list[int]] = {}
    for line in lines_of(run_dir_of(settings), "step"):
        batches = [run.plan.epoch(line["epoch"]).batch(index) for index in line["batches"]]
        trained.setdefault(line["epoch"], []).extend(int(row) for batch in batches for row in batch.rows)
        assert line["values"]["window/samples"] == sum(len(batch.rows) for batch in batches)
    assert all(len(rows) == len(set(rows)) for rows in trained.values())
    usable = np.flatnonzero(np.asarray(run.source.eligible)).tolist()
    assert sorted(trained[0]) == usable and len(trained) >= 2


def test_a_steered_run_resumes_and_pipelines_to_the_same_bits(make_run: MakeRun) -> None:
    inline = run_dir_of(steered(make_run, "inline"))
    pipeline = run_dir_of(steered(make_run, "pipeline", flow={"mode": "pipeline"}))
    assert same(weights(inline, 14), weights(pipeline, 14))
    whole = weights(inline, 14)
    for lost in (9, 3):  # behind the change, and before it: then steps 4 to 6 are planned as they were
        for step in checkpoints.steps(inline):
            if step > lost:
                shutil.rmtree(checkpoints.checkpoint_path(inline, step))
        if lost == 9:
            assert main(["train", str(inline)]) == 0
            assert same(weights(inline, 14), whole)
        else:
            run = built(inline / "settings.yaml")
            assert [planned.batches for planned in run.steps[3:6]] == [range(3, 4), range(4, 5), range(5, 6)]


def test_fewer_steps_than_are_taken_is_refused(make_run: MakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(make_run(**FIRST))]) == 0
    assert main(["train", str(make_run(**{**FIRST, "train": {"max_steps": 4}})), "--yes"]) == 2
    assert "6 steps are taken already, and these settings ask for 4; raise train.max_steps" in capfd.readouterr().err


def test_a_plan_that_carries_samples_cannot_change(make_run: MakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(make_run(**FIRST))]) == 0
    settings = make_run(**{**FIRST, "plan": {"leftover": "carry"}, "train": {"max_steps": 9}})
    assert main(["train", str(settings), "--yes"]) == 2
    assert "plan: with plan.leftover: carry an epoch hands samples on to the next" in capfd.readouterr().err


def test_a_fork_continues_as_the_run_would_have(make_run: MakeRun, tmp_path: Path, capfd) -> None:
    first = run_dir_of(steered(make_run, "first"))
    same_again, gentle = tmp_path / "again", tmp_path / "gentle"
    assert main(["fork", str(first), "--step", "9", "--out", str(same_again)]) == 0
    assert "next: paceline train" in capfd.readouterr().out
    assert main(["train", str(same_again)]) == 0
    assert same(weights(same_again, 14), weights(first, 14))
    assert run_directory.read_run_facts(same_again)["forked_from"] == {"run": str(first), "step": 9}
    assert [line["step"] for line in lines_of(same_again, "step")] == list(range(1, 15))

    assert main(["fork", str(first), "--step", "3", "--out", str(gentle), "--optimizer.lr", "1e-4"]) == 0
    assert "from step 4 on: optimizer.lr 0.0005 → 0.0001" in capfd.readouterr().err
    assert [(change.step, change.of_plan) for change in read_changes(gentle)] == [(3, True), (3, False)]
    assert main(["train", str(gentle)]) == 0
    assert lines_of(gentle, "step")[2]["step"] == 3
    assert not same(weights(gentle, 14), weights(first, 14))


def test_what_cannot_be_forked_is_one_line(make_run: MakeRun, tmp_path: Path, capfd) -> None:
    first = run_dir_of(make_run("first", **FIRST))
    assert main(["train", str(first.with_suffix(".yaml"))]) == 0
    out = str(tmp_path / "new")
    for words, says in (
        (["--out", str(first)], "is there already"),
        (["--out", out, "--step", "4"], "4"),
    ):
        capfd.readouterr()
        assert main(["fork", str(first), *words]) == 1
        said = capfd.readouterr().err.strip()
        assert says in said and len(said.splitlines()) == 1
    assert not Path(out).exists()


def test_a_fork_on_other_data_begins_a_new_epoch_count(
    make_run: MakeRun, tmp_path: Path, few_chats: Path, capfd
) -> None:
    first = run_dir_of(make_run("first", **FIRST))
    assert main(["train", str(first.with_suffix(".yaml"))]) == 0
    other, out = tmp_path / "other.jsonl", tmp_path / "elsewhere"
    other.write_text("\n".join(few_chats.read_text().splitlines()[:50]) + "\n")
    capfd.readouterr()
    words = ["--step", "6", "--out", str(out), "--data.train", f"[{other}]", "--train.max_steps", "10"]
    assert main(["fork", str(first), *words, "--train.epochs", "3"]) == 0
    said = capfd.readouterr().err
    assert "other data: a new epoch count begins, step 7 is the first of epoch 1" in said and "data.train" in said
    assert main(["train", str(out)]) == 0
    lines = lines_of(out, "step")
    assert [line["step"] for line in lines] == [7, 8, 9, 10] and lines[0]["epoch"] == 0
    (event,) = [line for line in lines_of(out, "event") if line["event"] == "forked"]
    assert event["fields"]["run"] == str(first) and event["fields"]["step"] == 6
    facts, before = run_directory.read_run_facts(out), run_directory.read_run_facts(first)
    assert facts["begins"] == {"step": 6, "epoch": 0} and facts["data_fingerprint"] != before["data_fingerprint"]
    state = checkpoints.read_checkpoint(out, 10)
    assert state["steps_done"] == 10 and {float(e["step"]) for e in state["optimizer"]["adamw"]["state"].values()} == {
        10.0
    }
    assert main(["train", str(out)]) == 0 and checkpoints.newest_step(out) == 10


def test_a_fork_counts_epochs_of_its_own_data(make_run: MakeRun, tmp_path: Path, few_chats: Path) -> None:
    """In the second epoch or later: other data begin with their first, the same data go on with the next step's."""
    few, other = tmp_path / "few.jsonl", tmp_path / "other.jsonl"
    lines = few_chats.read_text().splitlines()
    few.write_text("\n".join(lines[:12]) + "\n")
    other.write_text("\n".join(lines[12:24]) + "\n")
    data = {"train": [str(few)], "store": str(tmp_path / "store")}
    checkpoint = {"every_steps": 3, "keep_last": 9}
    first = run_dir_of(make_run("first", data=data, checkpoint=checkpoint, train={"epochs": 9, "max_steps": 7}))
    assert main(["train", str(first.with_suffix(".yaml"))]) == 0
    epochs = [line["epoch"] for line in lines_of(first, "step")]
    assert epochs[6] > 0, "the run must be behind its first epoch for this test to say anything"
    forks = {"data": ["--data.train", f"[{other}]"], "seed": ["--seed", "7"]}
    for name, words in forks.items():
        assert main(["fork", str(first), "--step", "6", "--out", str(tmp_path / name), *words]) == 0
    begins = {name: run_directory.read_run_facts(tmp_path / name)["begins"] for name in forks}
    assert begins == {"data": {"step": 6, "epoch": 0}, "seed": {"step": 6, "epoch": epochs[6]}}


def test_a_fork_of_another_shape_takes_what_fits(make_run: MakeRun, tmp_path: Path, capfd) -> None:
    first = run_dir_of(make_run("first", **FIRST))
    assert main(["train", str(first.with_suffix(".yaml"))]) == 0
    out = tmp_path / "deeper"
    capfd.readouterr()
    words = ["--step", "3", "--out", str(out), "--drafter.num-layers", "3", "--target.taps", "[1]"]
    assert main(["fork", str(first), *words, "--drafter.block-size", "6"]) == 0
    said = capfd.readouterr().err
    assert (
        "from step 4 on: drafter.block_size 4 → 6" in said
        and "step 4 is the first of epoch 1, which is planned anew" in said
    )
    assert "new tensors, with weights of their own: fc.weight, layers.2.input_layernorm.weight" in said
    assert "left over, not taken: fc.weight" in said and "moments of 24 of 24 tensors" in said

    run = built(out / "settings.yaml")
    assert run.first_step == 3 and run.steps[0].step == 4 and run.spec.num_layers == 3
    learner = learner_factory(run)(load_shared_weights(run.settings.target, run.settings.target.dtype))
    old, moments = checkpoints.read_checkpoint(first, 3), learner.optimizers["adamw"].state
    assert learner.steps_done == 3
    names = list(Drafter(built(first.with_suffix(".yaml")).spec).state_dict())
    ordered = sorted(names, key=lambda name: old["network"][name].ndim < 2)
    for name, parameter in learner.network.named_parameters():
        if name == "fc.weight" or name.startswith("layers.2."):
            assert parameter not in moments, name
            continue
        assert torch.equal(parameter.detach(), old["network"][name]), name
        theirs = old["optimizer"]["adamw"]["state"][ordered.index(name)]
        assert torch.equal(moments[parameter]["exp_avg"], theirs["exp_avg"]), name
    assert main(["train", str(out)]) == 0
    assert lines_of(out, "step")[0]["step"] == 4 and checkpoints.newest_step(out) == 6


def test_a_fork_of_another_seed_plans_its_epoch_anew(make_run: MakeRun, tmp_path: Path, capfd) -> None:
    """All weights and moments stay; what of the epoch under way is trained may come again, and the fork says so."""
    first = run_dir_of(make_run("first", **FIRST, data={"store": None}))  # its store is inside the run
    assert main(["train", str(first.with_suffix(".yaml"))]) == 0
    assert main(["fork", str(first), "--out", str(tmp_path / "slow"), "--optimizer.lr", "1e-4"]) == 0
    assert "other data" not in capfd.readouterr().err
    slow = run_directory.read_run_facts(tmp_path / "slow")
    assert (
        "begins" not in slow
        and slow["data_fingerprint"] == built(tmp_path / "slow" / "settings.yaml").source.fingerprint
    )
    out = tmp_path / "reseeded"
    assert main(["fork", str(first), "--out", str(out), "--seed", "7", "--train.max_steps", "9"]) == 0
    assert "step 7 is the first of epoch 1, which is planned anew from its beginning" in capfd.readouterr().err
    run = built(out / "settings.yaml")
    assert (run.first_step, run.plan.begin.epoch, run.settings.seed) == (6, 0, 7)
