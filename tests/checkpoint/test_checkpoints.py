"""Checkpoints appear whole or not at all."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.atomic_files import ASIDE
from paceline.checkpoint import checkpoints, run_directory
from paceline.checkpoint.retention import Best
from paceline.config import validate_settings
from paceline.errors import CheckpointError


def state(value: float, size: int = 10) -> dict:
    return {
        "network": {"fc.weight": torch.full((size, size), value)},
        "optimizer": {"step": 3, "exp_avg": [torch.full((size,), value / 2)]},
        "skipped": 1,
    }


def test_reads_back_what_was_written_bit_for_bit(tmp_path: Path) -> None:
    written = state(1 / 3)
    checkpoints.write_checkpoint(tmp_path, 7, written, keep_last=2)
    read = checkpoints.read_checkpoint(tmp_path, 7)
    assert torch.equal(read["network"]["fc.weight"], written["network"]["fc.weight"])
    assert torch.equal(read["optimizer"]["exp_avg"][0], written["optimizer"]["exp_avg"][0])
    assert read["optimizer"]["step"] == 3 and read["skipped"] == 1
    assert checkpoints.newest_step(tmp_path) == 7


def test_prunes_the_oldest_and_only_after_the_new_one_is_whole(tmp_path: Path) -> None:
    for step in (100, 20, 300, 1000):
        checkpoints.write_checkpoint(tmp_path, step, state(step), keep_last=2)
    assert checkpoints.steps(tmp_path) == [300, 1000]


def test_half_written_checkpoints_do_not_count(tmp_path: Path) -> None:
    checkpoints.write_checkpoint(tmp_path, 5, state(5), keep_last=2)
    half = checkpoints.checkpoint_path(tmp_path, 9)
    half.with_name(half.name + ASIDE).mkdir()
    without_note = checkpoints.checkpoint_path(tmp_path, 8)
    without_note.mkdir()
    assert checkpoints.steps(tmp_path) == [5]
    checkpoints.write_checkpoint(tmp_path, 9, state(9), keep_last=2)
    assert checkpoints.steps(tmp_path) == [5, 9]


def test_a_full_disk_leaves_the_checkpoint_before_and_says_so(tmp_path: Path) -> None:
    """The kernel refuses to grow files over a limit, as a full disk does: a real error in the middle of a file."""
    checkpoints.write_checkpoint(tmp_path, 5, state(5), keep_last=1)
    script = (
        "import resource, signal, torch\n"
        "from pathlib import Path\n"
        "from paceline.checkpoint import checkpoints\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"run = Path({str(tmp_path)!r})\n"
        "try:\n"
        "    checkpoints.write_checkpoint(run, 9, {'network': {'w': torch.zeros(500, 500)}}, keep_last=1)\n"
        "except checkpoints.CheckpointError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert "checkpoint not written" in done.stdout and "the checkpoint of step 5 is intact" in done.stdout
    assert done.stdout.count("\n") == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    assert torch.equal(
        checkpoints.read_checkpoint(tmp_path, 5)["network"]["fc.weight"], state(5)["network"]["fc.weight"]
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_damaged_checkpoint_is_one_clear_line(tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint(tmp_path, 5, state(5), keep_last=1)
    with (folder / checkpoints.WEIGHTS).open("r+b") as file:
        file.truncate((folder / checkpoints.WEIGHTS).stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"damaged .* remove this checkpoint to resume from the one before"):
        checkpoints.read_checkpoint(tmp_path, 5)


def open_as(run_dir: Path, **facts: object) -> None:
    """Make a run of these facts there, or make the one that is there be it."""
    settings = validate_settings({"run_dir": str(run_dir), "target": {"path": "t"}}, {}, "test")
    (run_dir / run_directory.RUN).unlink(missing_ok=True)
    (run_dir / run_directory.SETTINGS).unlink(missing_ok=True)
    before, aside = run_dir / run_directory.CHECKPOINTS, run_dir.with_name("aside")
    if before.is_dir():
        before.rename(aside)
    run_directory.open_run(settings, facts)
    if aside.is_dir():
        aside.rename(before)


def test_a_checkpoint_of_another_target_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    open_as(run, target={"configuration": "a", "weights": "b"})
    checkpoints.write_checkpoint(run, 5, state(5), keep_last=2)
    assert checkpoints.read_checkpoint(run, 5)
    open_as(run, target={"configuration": "a", "weights": "c"})
    with pytest.raises(CheckpointError, match="another target than the run's; they differ in weights;") as error:
        checkpoints.read_checkpoint(run, 5)
    assert len(error.value.errors) == 1


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    open_as(run, data_fingerprint="a", total_steps=10)
    checkpoints.write_checkpoint(run, 5, state(5), keep_last=2)
    open_as(run, data_fingerprint="b", total_steps=11)
    with pytest.raises(CheckpointError, match="another run; they differ in data fingerprint; remove"):
        checkpoints.read_checkpoint(run, 5)


def test_a_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    open_as(run, target={"weights": "b"}, data_fingerprint="d", drafter={"block_size": 4}, total_steps=9)
    checkpoints.write_checkpoint(run, 5, state(5), keep_last=2, note={"epoch": 1, "metrics": {"loss": 2.0}})
    note = checkpoints.read_note(run, 5)
    assert (note["step"], note["epoch"], note["metrics"]) == (5, 1, {"loss": 2.0})
    assert note["run"]["data_fingerprint"] == "d" and note["run"]["drafter"] == {"block_size": 4}
    assert note["run"]["target"] == {"weights": "b"} and note["run"]["total_steps"] == 9
    assert note["settings"] == run_directory.read_run_settings(run).model_dump(mode="json")
    assert {"paceline", "torch", "python"} <= note["versions"].keys()


@pytest.mark.parametrize("name", [checkpoints.WEIGHTS, checkpoints.STATE, checkpoints.NOTE])
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path: Path, name: str) -> None:
    """One flipped bit in the middle of a file is enough."""
    for step in (5, 9):
        checkpoints.write_checkpoint(tmp_path, step, state(step, 60), keep_last=2)
    assert checkpoints.resume_point(tmp_path) == (9, ())
    path = checkpoints.checkpoint_path(tmp_path, 9) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if name != checkpoints.NOTE else 0] ^= 1
    path.write_bytes(content)
    step, warnings = checkpoints.resume_point(tmp_path)
    assert step == 5 and len(warnings) == 1
    assert (
        "step-00000009: damaged" in warnings[0]
        and "the run continues from step 5" in warnings[0]
        and "\n" not in warnings[0]
    )
    checkpoints.quarantine_after(tmp_path, 5)
    assert checkpoints.steps(tmp_path) == [5] and checkpoints.resume_point(tmp_path) == (5, ())
    assert (tmp_path / "checkpoints" / "step-00000009.damaged" / name).read_bytes() == content
    checkpoints.write_checkpoint(tmp_path, 9, state(9), keep_last=2)
    assert checkpoints.resume_point(tmp_path) == (9, ())


def test_where_all_checkpoints_are_damaged_nothing_begins_anew(tmp_path: Path) -> None:
    for step in (5, 9):
        (checkpoints.write_checkpoint(tmp_path, step, state(step), keep_last=2) / checkpoints.STATE).unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.resume_point(tmp_path)
    (line,) = caught.value.errors
    damaged = "damaged (No such file or directory)"
    assert f"no checkpoint can be used: step-00000009 {damaged}, step-00000005 {damaged}; put back" in line
    assert checkpoints.steps(tmp_path) == [5, 9]


def test_a_checkpoint_without_its_note_is_damaged(tmp_path: Path) -> None:
    """Checkpoints appear whole, so one that lost its note is no reason to begin anew in silence."""
    for step in (5, 9):
        checkpoints.write_checkpoint(tmp_path, step, state(step), keep_last=2)
    (checkpoints.checkpoint_path(tmp_path, 9) / checkpoints.NOTE).unlink()
    step, (warning,) = checkpoints.resume_point(tmp_path)
    assert step == 5 and "step-00000009: damaged (checkpoint.json: No such file" in warning
    checkpoints.quarantine_after(tmp_path, 5)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000005", "step-00000009.damaged"]
    (folder / "step-00000005" / checkpoints.NOTE).unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint can be used: step-00000005 damaged \(checkpoint.json"):
        checkpoints.resume_point(tmp_path)


def test_what_a_kill_left_is_cleared(tmp_path: Path) -> None:
    checkpoints.write_checkpoint(tmp_path, 5, state(5), keep_last=2)
    whole = checkpoints.checkpoint_path(tmp_path, 5)
    for name in (f"step-00000009{ASIDE}", "step-00000001.old", "step-00000007.damaged"):
        whole.with_name(name).mkdir()
    kept = checkpoints.export_path(tmp_path, 5)
    for path in (kept, kept.with_name(f"step-00000009{ASIDE}")):
        path.mkdir(parents=True)
    checkpoints.clear_unfinished(tmp_path)
    assert [path.name for path in kept.parent.iterdir()] == ["step-00000005"]
    assert sorted(path.name for path in whole.parent.iterdir()) == ["step-00000005", "step-00000007.damaged"]


def test_the_best_and_every_so_manyth_stay(tmp_path: Path) -> None:
    best = Best("validation/loss", "lower")
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None), (50, 5.0), (60, float("nan"))):
        note = {"metrics": {} if loss is None else {"validation/loss": loss}}
        checkpoints.write_checkpoint(tmp_path, step, state(step), keep_last=1, keep_every=50, keep_best=best, note=note)
        assert checkpoints.steps(tmp_path)[-1] == step
    assert checkpoints.steps(tmp_path) == [20, 50, 60]
    checkpoints.write_checkpoint(
        tmp_path, 70, state(70), keep_last=1, keep_best=best, note={"metrics": {"validation/loss": 0.5}}
    )
    assert checkpoints.steps(tmp_path) == [70]


def test_the_best_by_decoding_is_known_after_it_was_written(tmp_path: Path) -> None:
    best = Best("decode/tau", "higher")
    for step, tau in ((10, 2.0), (20, 3.5), (30, 3.0), (40, None)):
        checkpoints.write_checkpoint(tmp_path, step, state(step), keep_last=2, keep_best=best)
        if tau is not None:
            run_directory.add_evaluation(tmp_path, step, {"tau_micro": tau, "tau_macro": 1.0})
    assert checkpoints.steps(tmp_path) == [20, 30, 40]
    checkpoints.write_checkpoint(tmp_path, 50, state(50), keep_last=2, keep_best=best)
    assert checkpoints.steps(tmp_path) == [20, 40, 50]


def test_an_export_goes_with_its_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20):
        checkpoints.export_path(tmp_path, step).mkdir(parents=True)
        checkpoints.write_checkpoint(tmp_path, step, state(step), keep_last=1)
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["step-00000020"]
