"""A run directory is one run's, and says what differs when it is not."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoint import run_directory
from paceline.checkpoint.changes import read_changes
from paceline.config import Settings, absolute_paths, validate_settings
from paceline.errors import ConfigError, RunDirectoryError

FACTS = {"drafter": {"block_size": 8}, "data_fingerprint": "abc"}


def settings(run_dir: Path, **sections: dict) -> Settings:
    return validate_settings({"run_dir": str(run_dir), "target": {"path": "t"}, **sections}, {}, "test")


def test_second_start_of_the_same_run_is_accepted(tmp_path: Path) -> None:
    run_directory.open_run(settings(tmp_path / "r"), FACTS)
    run_directory.open_run(settings(tmp_path / "r"), FACTS)
    assert run_directory.read_run_settings(tmp_path / "r") == absolute_paths(settings(tmp_path / "r"))
    assert run_directory.read_run_facts(tmp_path / "r")["versions"]["torch"]


def test_a_path_that_is_written_otherwise_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_directory.open_run(settings(Path("r"), drafter={"init": "old"}), FACTS)
    run_directory.open_run(settings(Path("r"), drafter={"init": str(tmp_path / "old")}), FACTS)
    assert run_directory.read_run_settings(Path("r")).drafter.init == str(tmp_path / "old")
    with pytest.raises(RunDirectoryError, match=r"made with drafter\.init"):
        run_directory.check_run(settings(Path("r"), drafter={"init": "other"}))


def test_each_fixed_setting_is_a_line_with_both_values(tmp_path: Path) -> None:
    run_directory.open_run(settings(tmp_path / "r"), FACTS)
    changed = settings(tmp_path / "r", optimizer={"name": "muon", "lr": 0.5}, seed=3)
    with pytest.raises(RunDirectoryError) as caught:
        run_directory.open_run(changed, FACTS, 40)
    assert len(caught.value.errors) == 2 and "optimizer.lr may stay; one run may change plan" in caught.value.errors[-1]
    assert "made with seed = 0, asked for 3; put it back, or make another run of it" in str(caught.value)
    assert "made with optimizer.name = 'adamw', asked for 'muon'" in str(caught.value)
    assert run_directory.read_run_settings(tmp_path / "r").optimizer.lr == 0.0006
    assert read_changes(tmp_path / "r") == []


def test_steered_settings_are_kept_with_their_step(tmp_path: Path) -> None:
    run_directory.open_run(settings(tmp_path / "r"), {**FACTS, "total_steps": 100})
    weights = {"plan": {"weights": {"code": 2.0}}}
    run_directory.open_run(settings(tmp_path / "r", **weights), {**FACTS, "total_steps": 90})
    assert read_changes(tmp_path / "r") == []  # nothing was trained yet
    changed = settings(tmp_path / "r", optimizer={"lr": 0.5}, plan={"accumulate": 2})
    run_directory.open_run(changed, {**FACTS, "total_steps": 120}, 40)
    (change,) = read_changes(tmp_path / "r")
    assert change.step == 40 and change.of_plan and change.plan["weights"] == {"code": 2.0}
    assert sorted(change.lines()) == [
        "from step 41 on: optimizer.lr 0.0006 → 0.5",
        "from step 41 on: plan.accumulate 4 → 2",
        "from step 41 on: plan.weights.code 2.0 → None",
    ]
    assert run_directory.read_run_facts(tmp_path / "r")["total_steps"] == 120
    run_directory.open_run(changed, {**FACTS, "total_steps": 120}, 60)
    assert read_changes(tmp_path / "r") == [change]
    run_directory.open_run(settings(tmp_path / "r", plan={"accumulate": 2}), {**FACTS, "total_steps": 120}, 60)
    assert [(found.step, found.of_plan) for found in read_changes(tmp_path / "r")] == [(40, True), (60, False)]


def test_a_damaged_history_is_one_line(tmp_path: Path) -> None:
    for text in ("{", "3", "[3]", '[{"step": 1}]', '[{"step": 1, "changed": {"a": 1}}]'):
        (tmp_path / "changes.json").write_text(text)
        with pytest.raises(RunDirectoryError, match=r"changes\.json: damaged .* put it back") as caught:
            read_changes(tmp_path)
        assert len(caught.value.errors) == 1


def test_changed_data_is_refused(tmp_path: Path) -> None:
    run_directory.open_run(settings(tmp_path / "r"), FACTS)
    with pytest.raises(RunDirectoryError, match="its data fingerprint is not today's"):
        run_directory.open_run(settings(tmp_path / "r"), {**FACTS, "data_fingerprint": "xyz"})


def test_sections_that_do_not_change_what_is_learned_may_change(tmp_path: Path) -> None:
    run_directory.open_run(settings(tmp_path / "r"), FACTS)
    run_directory.open_run(settings(tmp_path / "r", flow={"mode": "inline"}, checkpoint={"keep_last": 9}), FACTS)
    assert run_directory.read_run_settings(tmp_path / "r").checkpoint.keep_last == 9


def test_a_refusal_says_which_of_the_changes_may_stay(tmp_path: Path) -> None:
    run_directory.open_run(settings(tmp_path / "r"), FACTS)
    changed = {"seed": 9, "flow": {"target_devices": ["cpu", "cpu"]}, "data": {"workers": 2}}
    with pytest.raises(RunDirectoryError) as caught:
        run_directory.open_run(settings(tmp_path / "r", **changed), FACTS)
    assert len(caught.value.errors) == 1
    assert "of the changes asked for, data.workers, flow.target_devices may stay" in caught.value.errors[0]


def test_where_things_lie_and_how_they_are_computed_may_change(tmp_path: Path) -> None:
    """Fingerprints, not paths, say whether target and data are the same."""
    run_directory.open_run(settings(tmp_path / "r"), FACTS)
    moved = {"target": {"path": "elsewhere"}, "data": {"store": "s", "train": ["x"]}, "drafter": {"head_chunk": 7}}
    run_directory.open_run(settings(tmp_path / "r", **moved), FACTS)
    assert run_directory.read_run_settings(tmp_path / "r").target.path == str(Path("elsewhere").absolute())


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Root may write everywhere, so the process is another user for a moment."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)


@pytest.fixture
def locked() -> Iterator[Path]:
    """A folder with a run in it, where nobody but its owner, if he, may write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_directory.open_run(settings(folder / "old"), {})
        (folder / "old").chmod(0o555)
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
        (folder / "old").chmod(0o755)


def test_a_directory_that_cannot_be_written_is_one_line(locked: Path, unprivileged: None) -> None:
    for name in ("old", "new"):
        for work in (run_directory.check_writable, lambda run: run_directory.open_run(settings(run), {})):
            with pytest.raises(RunDirectoryError, match=rf"{name}: cannot be written .Permission denied.; ") as caught:
                work(locked / name)
            assert len(caught.value.errors) == 1


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("mine")
    for path in (tmp_path / "r", tmp_path / "r" / "deeper"):
        with pytest.raises(RunDirectoryError, match="r: is a file"):
            run_directory.check_writable(path)


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunDirectoryError, match=r"not empty and no run of paceline \(thesis.tex\)"):
        run_directory.open_run(settings(tmp_path), FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_with_only_stores_may_become_a_run(tmp_path: Path) -> None:
    for name in ("store", "store-heldout", ".store.lock"):
        (tmp_path / name).mkdir()
    run_directory.open_run(settings(tmp_path), FACTS)
    assert run_directory.is_run_directory(tmp_path)


def test_evaluations_are_kept_by_step(tmp_path: Path) -> None:
    for step, tau in ((300, 2.0), (0, 1.0), (300, 2.5)):
        run_directory.add_evaluation(tmp_path, step, {"tau": tau})
    assert run_directory.read_evaluations(tmp_path) == [{"step": 0, "tau": 1.0}, {"step": 300, "tau": 2.5}]


def test_other_settings_replace_no_own_evaluation(tmp_path: Path) -> None:
    run_directory.add_evaluation(tmp_path, 300, {"tau": 2.5, "conditions": {"num_prompts": 12}})
    for prompts, tau in ((4, 2.7), (8, 2.6), (4, 2.8)):
        report = {"tau": tau, "conditions": {"num_prompts": prompts}}
        run_directory.add_evaluation(tmp_path, 300, report, "others")
    assert [entry["tau"] for entry in run_directory.read_evaluations(tmp_path)] == [2.5]
    assert [entry["tau"] for entry in run_directory.read_evaluations(tmp_path, "others")] == [2.6, 2.8]
    run_directory.add_evaluation(tmp_path, 300, {"tau": 2.4, "conditions": {"num_prompts": 12}})
    assert [entry["tau"] for entry in run_directory.read_evaluations(tmp_path)] == [2.4]
    assert len(run_directory.read_evaluations(tmp_path, "others")) == 2


def test_a_run_keeps_its_directory(tmp_path: Path) -> None:
    """Going on with the first run where a second one was asked for would be silent."""
    run, other = tmp_path / "r", tmp_path / "s"
    run_directory.open_run(settings(run), FACTS)
    with pytest.raises(ConfigError, match=r"run_dir: asked for .*/s, but the run .*/r was given; .*/r/settings.yaml"):
        run_directory.read_run_settings(run, {"run_dir": str(other)})
    assert run_directory.read_run_settings(run, {"run_dir": str(run / ".." / "r")}).run_dir == str(run)


def test_damaged_files_are_one_clear_line(tmp_path: Path) -> None:
    run_directory.open_run(settings(tmp_path / "r"), FACTS)
    (tmp_path / "r" / run_directory.RUN).write_text(json.dumps({})[:-1])
    with pytest.raises(RunDirectoryError, match="damaged"):
        run_directory.read_run_facts(tmp_path / "r")
    with pytest.raises(RunDirectoryError, match="no run here"):
        run_directory.read_run_settings(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"evaluations": [5]}', b"[{}]"])
def test_files_that_hold_something_else_are_one_clear_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / run_directory.EVALUATION).write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"evaluation.json: damaged \(.+\); remove it and evaluate again"):
        run_directory.read_evaluations(tmp_path)
    if not content.startswith(b'{"'):
        (tmp_path / run_directory.RUN).write_bytes(content)
        with pytest.raises(RunDirectoryError, match=r"run.json: damaged \(.+\); start the run in a new directory"):
            run_directory.read_run_facts(tmp_path)


def test_facts_that_follow_from_settings_are_not_errors(tmp_path: Path) -> None:
    run_directory.open_run(settings(tmp_path / "r"), {**FACTS, "total_steps": 30})
    run_directory.open_run(settings(tmp_path / "r", train={"max_steps": 60}), {**FACTS, "total_steps": 60})
    assert run_directory.read_run_facts(tmp_path / "r")["total_steps"] == 60
    with pytest.raises(RunDirectoryError, match="made with seed = 0, asked for 1") as caught:
        run_directory.open_run(settings(tmp_path / "r", seed=1), {**FACTS, "drafter": {}, "init": "x"})
    assert len(caught.value.errors) == 1
    with pytest.raises(RunDirectoryError, match="its data fingerprint is not today's"):
        run_directory.open_run(settings(tmp_path / "r", train={"max_steps": 60}), {"data_fingerprint": "x"})


def test_a_link_that_leads_nowhere_is_said_to(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "unmounted")
    told = f"{tmp_path / 'run'}: is a link to {tmp_path / 'unmounted'}, which does not exist; make that folder"
    for check in (
        lambda: run_directory.check_writable(tmp_path / "run"),
        lambda: run_directory.check_writable(tmp_path / "run" / "inner"),
        lambda: run_directory.check_run(settings(tmp_path / "run")),
    ):
        with pytest.raises(RunDirectoryError) as caught:
            check()
        assert str(caught.value).startswith(told)
