from __future__ import annotations

import math

import numpy as np
import pytest

from observed_runs import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.errors import MetricError, RunDirectoryError
from paceline.observe.metrics_file import EventLine, HeaderLine, StepLine, read_lines
from paceline.observe.observer import open_observer
from paceline.observe.run_history import read_history
from paceline.types import Ratio

QUIET = ObserveConfig(console="quiet")
SAMPLES = random_samples(np.random.default_rng(0))


def open_quietly(run_dir, *, settings=QUIET, total_steps=10, first_step=0, header=None):
    return open_observer(settings, run_dir, total_steps=total_steps, header=header or {}, first_step=first_step)


def lines_of(run_dir, kind):
    return [line for line in read_lines(run_dir / "metrics.jsonl")[0] if isinstance(line, kind)]


def events_of(run_dir, name):
    return [line for line in lines_of(run_dir, EventLine) if line.event == name]


@pytest.mark.parametrize(("every", "spans"), [(1, [1] * 10), (3, [3, 3, 3, 1]), (4, [4, 4, 2]), (100, [10])])
def test_lines_cover_every_step_once(tmp_path, every, spans):
    observer = open_quietly(tmp_path, settings=QUIET.model_copy(update={"every_steps": every}))
    for step in range(1, 11):
        observer.step(report_of(step, SAMPLES))
    observer.close()
    lines = lines_of(tmp_path, StepLine)
    assert [line.steps for line in lines] == spans
    assert [line.step for line in lines] == list(np.cumsum(spans))
    assert lines[-1].values["progress/share"] == 1.0


def test_a_checkpoint_ends_a_line_so_resuming_loses_no_step(tmp_path):
    settings = QUIET.model_copy(update={"every_steps": 4})
    observer = open_quietly(tmp_path, settings=settings, header={"samples_per_epoch": 240})
    for step in range(1, 10):
        observer.step(report_of(step, SAMPLES))
        if step == 6:
            observer.event("checkpoint", path="checkpoints/step-00000006")
    observer = open_quietly(tmp_path, settings=settings, first_step=6, header={"samples_per_epoch": 240})
    for step in range(7, 11):
        observer.step(report_of(step, SAMPLES))
    observer.close()
    lines = lines_of(tmp_path, StepLine)
    assert [(line.step, line.steps) for line in lines] == [(4, 4), (6, 2), (8, 2), (10, 2)]
    assert [line.values["progress/epoch_samples"] for line in lines] == [12 * step for step in (4, 6, 8, 10)]
    assert lines[-1].values["progress/epoch_coverage"] == 0.5
    assert [line.step for line in lines_of(tmp_path, HeaderLine)] == [0, 6]
    assert len(events_of(tmp_path, "checkpoint")) == 1


def resumed_after_a_kill(run_dir, *, checkpoint: int, per_epoch: int = 8):
    """Killed when the checkpoint of that step was on disk and the lines of its last two steps were not written yet."""
    header = {"samples_per_epoch": 12 * per_epoch}

    def report(step):
        return report_of(step, SAMPLES, epoch=(step - 1) // per_epoch, window=(step - 1) % per_epoch)

    observer = open_quietly(run_dir, total_steps=24, header=header)
    for step in range(1, checkpoint - 1):
        observer.step(report(step))
    observer = open_quietly(run_dir, total_steps=24, first_step=checkpoint, header=header)
    for step in range(checkpoint + 1, 25):
        observer.step(report(step))
    observer.close()
    return {line.step: line.values for line in lines_of(run_dir, StepLine)}


@pytest.mark.parametrize("checkpoint", [5, 9, 16])
def test_a_kill_before_the_line_of_a_checkpoint_is_noted(tmp_path, checkpoint):
    values = resumed_after_a_kill(tmp_path, checkpoint=checkpoint)
    gap = f"no metrics of steps {checkpoint - 1}–{checkpoint}"
    assert [event.fields["text"][: len(gap)] for event in events_of(tmp_path, "warning")] == [gap]
    assert any(note.startswith(gap) for note in read_history(tmp_path).notes)
    for step, found in values.items():
        counted = (step - 1) % 8 + 1
        # After the gap the epoch's count is unknown, up to the next epoch; a new epoch begins at zero.
        unknown = step > checkpoint and (step - 1) // 8 == checkpoint // 8 and checkpoint % 8
        assert found.get("progress/epoch_samples") == (None if unknown else 12 * counted), step
        assert found.get("progress/epoch_coverage") == (None if unknown else counted / 8)


def test_a_count_that_was_unknown_stays_so_over_another_start(tmp_path):
    resumed_after_a_kill(tmp_path, checkpoint=5)
    observer = open_quietly(tmp_path, total_steps=24, first_step=6, header={"samples_per_epoch": 96})
    observer.step(report_of(7, SAMPLES, window=6))
    observer.close()
    assert "progress/epoch_samples" not in lines_of(tmp_path, StepLine)[-1].values


def test_a_missing_metrics_file_is_a_gap_from_the_first_step(tmp_path):
    observer = open_quietly(tmp_path, first_step=4)
    observer.step(report_of(5, SAMPLES))
    observer.close()
    assert events_of(tmp_path, "warning")[0].fields["text"].startswith("no metrics of steps 1–4")


def test_lines_that_were_cut_out_are_said_at_the_start(tmp_path):
    observer = open_quietly(tmp_path)
    for step in range(1, 7):
        observer.step(report_of(step, SAMPLES))
    observer.close()
    path = tmp_path / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(row for row in rows if '"step":3,' not in row and '"step":4,' not in row))
    open_quietly(tmp_path, first_step=6).close()
    [warning] = events_of(tmp_path, "warning")
    assert warning.fields["text"].startswith("no metrics of steps 3–4:")


def test_coverage_starts_anew_with_each_epoch(tmp_path):
    observer = open_quietly(tmp_path)
    for step in range(1, 5):
        observer.step(report_of(step, SAMPLES, epoch=(step - 1) // 2))
    observer.close()
    assert [line.values["progress/epoch_samples"] for line in lines_of(tmp_path, StepLine)] == [12, 24, 12, 24]


def test_an_unknown_name_cannot_be_logged(tmp_path):
    observer = open_quietly(tmp_path)
    with pytest.raises(MetricError, match="accuracy/slot-1: not in the metric catalogue"):
        observer.step(report_of(1, SAMPLES, ratios={"accuracy/slot-1": Ratio(1, 1)}))
    with pytest.raises(MetricError):
        observer.gauge("queue/depth", 1)
    observer.gauge("queue/features_items", 3)
    observer.close()


def test_gauges_go_out_with_the_next_line(tmp_path):
    observer = open_quietly(tmp_path)
    observer.gauge("queue/features_bytes", 2048)
    observer.step(report_of(1, SAMPLES))
    observer.step(report_of(2, SAMPLES))
    observer.close()
    first, second = lines_of(tmp_path, StepLine)
    assert first.values["queue/features_bytes"] == 2048 and "queue/features_bytes" not in second.values


def test_a_foreign_metrics_file_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("hello\n")
    with pytest.raises(RunDirectoryError, match="not a metric line"):
        open_quietly(tmp_path)


def test_closing_twice_does_nothing(tmp_path):
    observer = open_quietly(tmp_path)
    observer.close("interrupted")
    observer.close("finished")
    assert [event.fields["status"] for event in events_of(tmp_path, "closed")] == ["interrupted"]


def test_what_is_no_text_is_written_as_question_marks(tmp_path):
    """A file's name on Linux may hold any bytes."""
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    observer = open_quietly(tmp_path, header={name: [name]})
    observer.warn(f"{name} is damaged")
    observer.event("checkpoint", path=name, size=math.nan)
    observer.close(f"failed: {name}")
    lines, notes = read_lines(tmp_path / "metrics.jsonl")
    assert notes == [] and lines[0].header == {"caf?": ["caf?"]}
    assert [line.fields.get("text", line.fields.get("path")) for line in lines[1:3]] == ["caf? is damaged", "caf?"]
    assert lines[2].fields["size"] is None and lines[3].fields["status"] == "failed: caf?"


def test_counts_of_a_bucket_go_on_over_starts_and_idle_lines(tmp_path):
    samples = [sample for sample in SAMPLES if sample.bucket != 0]
    observer = open_quietly(tmp_path)
    observer.step(report_of(1, SAMPLES))
    observer.step(report_of(2, samples))
    observer.close()
    observer = open_quietly(tmp_path, first_step=2)
    observer.step(report_of(3, SAMPLES))
    observer.close()
    mine = [sample for sample in SAMPLES if sample.bucket == 0]
    lines = lines_of(tmp_path, StepLine)
    counts = [line.values["total_samples/bucket_0"] for line in lines]
    assert counts == [len(mine), len(mine), 2 * len(mine)] and mine
    assert lines[-1].values["total_real_tokens/bucket_0"] == 2 * sum(sample.length for sample in mine)
