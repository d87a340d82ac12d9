from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from observe.step_reports import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.errors import MetricError, RunDirectoryError, TrackerError
from paceline.observe.metrics_file import EventLine, HeaderLine, StepLine, read_lines
from paceline.observe.observer import open_observer
from paceline.observe.run_history import read_history
from paceline.observe.trackers.mirror import Mirror
from paceline.report.report import write_report
from paceline.types import Ratio

QUIET = ObserveConfig(console="quiet", mirror_queue_lines=4, mirror_start_limit_s=0.3, mirror_close_limit_s=0.3)
SAMPLES = random_samples(np.random.default_rng(0))


class Collecting:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.lines: list = []
        self.status = ""
        self.thread = ""
        self.abandoned = False

    def start(self) -> None:
        self.thread = threading.current_thread().name

    def write(self, line) -> None:
        self.lines.append(line)

    def abandon(self) -> None:
        self.abandoned = True

    def close(self, status) -> None:
        self.status = status


class Blocking(Collecting):
    """A sink that hangs at its first line until it is abandoned."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, line) -> None:
        super().write(line)
        assert self.released.wait(60)

    def abandon(self) -> None:
        super().abandon()
        self.released.set()


class Failing(Collecting):
    """A sink that raises at its third line."""

    def write(self, line) -> None:
        super().write(line)
        if len(self.lines) == 3:
            raise BrokenPipeError("backend is gone")


def open_quietly(run_dir, *, settings=QUIET, total_steps=10, first_step=0, header=None, **sinks):
    return open_observer(
        settings,
        run_dir,
        total_steps=total_steps,
        header=header or {},
        first_step=first_step,
        sinks=sinks,
    )


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


def test_a_checkpoint_ends_a_line_so_that_resuming_loses_no_step(tmp_path):
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
def test_a_kill_between_a_checkpoint_and_its_line_is_noted_and_no_stale_count_goes_on(tmp_path, checkpoint):
    values = resumed_after_a_kill(tmp_path, checkpoint=checkpoint)
    gap = f"no metrics of steps {checkpoint - 1}–{checkpoint}"
    assert [event.fields["text"][: len(gap)] for event in events_of(tmp_path, "note")] == [gap]
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


def test_a_metrics_file_that_was_moved_away_is_a_gap_from_the_first_step(tmp_path):
    observer = open_quietly(tmp_path, first_step=4)
    observer.step(report_of(5, SAMPLES))
    observer.close()
    assert events_of(tmp_path, "note")[0].fields["text"].startswith("no metrics of steps 1–4")


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


def test_a_mirror_gets_every_line_on_a_thread_of_its_own(tmp_path):
    sink = Collecting()
    observer = open_quietly(tmp_path, settings=ObserveConfig(console="quiet"), mine=sink)
    for step in range(1, 4):
        observer.step(report_of(step, SAMPLES))
    observer.event("checkpoint", step=3)
    observer.close("stopped")
    assert sink.thread == "observe-mine" and sink.status == "stopped"
    assert [line.step for line in sink.lines] == [1, 2, 3, 3]


def test_a_mirror_that_blocks_forever_costs_one_warning(tmp_path):
    sink = Blocking()
    observer = open_quietly(tmp_path, slow=sink)
    for step in range(1, 41):
        observer.step(report_of(step, SAMPLES))
    observer.close()
    assert sink.abandoned
    observer._mirrors[0]._thread.join(10)
    # It hung at one of the first lines; of the others the newest four had waited for it.
    assert [line.step for line in sink.lines[1:]] == [37, 38, 39, 40]
    assert [line.step for line in lines_of(tmp_path, StepLine)] == list(range(1, 41))
    (warning,) = events_of(tmp_path, "warning")
    assert "slow does not keep up" in warning.fields["text"]
    (closed,) = events_of(tmp_path, "closed")
    # 40 steps and one warning were sent; the sink holds at most one and four wait.
    assert 36 <= closed.fields["dropped_lines"]["slow"] <= 37


def test_a_mirror_that_fails_is_dropped_with_one_warning(tmp_path):
    sink = Failing()
    observer = open_quietly(tmp_path, broken=sink)
    for step in range(1, 4):
        observer.step(report_of(step, SAMPLES))
    observer._mirrors[0]._thread.join(10)
    for step in range(4, 9):
        observer.step(report_of(step, SAMPLES))
    observer.close()
    assert len(sink.lines) == 3 and len(lines_of(tmp_path, StepLine)) == 8
    (warning,) = events_of(tmp_path, "warning")
    assert "broken failed and is dropped (BrokenPipeError: backend is gone)" in warning.fields["text"]
    # The third line, the warning about it, and the five steps after.
    assert events_of(tmp_path, "closed")[0].fields["dropped_lines"] == {"broken": 7}


def test_a_mirror_that_fails_when_it_closes_costs_a_warning(tmp_path):
    class Late(Collecting):
        def close(self, status):
            raise SystemExit("server said no")

    observer = open_quietly(tmp_path, late=Late())
    observer.step(report_of(1, SAMPLES))
    observer.close()
    assert "SystemExit: server said no" in events_of(tmp_path, "warning")[0].fields["text"]


def test_a_mirror_that_cannot_start_stops_the_run_before_anything_is_written(tmp_path):
    class Refusing(Collecting):
        def start(self):
            raise ConnectionRefusedError("no route")

    earlier, refusing = Collecting(), Refusing()
    with pytest.raises(TrackerError, match=r"tracker cannot start .ConnectionRefusedError: no route.; correct that"):
        open_quietly(tmp_path, first=earlier, tracker=refusing)
    assert list(tmp_path.iterdir()) == []
    assert earlier.status == "failed: the run did not start" and refusing.abandoned


def test_a_mirror_that_hangs_at_the_start_is_refused_in_time(tmp_path):
    class Hanging(Blocking):
        def start(self):
            self.write(None)

    hanging = Hanging()
    with pytest.raises(TrackerError, match=r"tracker did not start within 0.3 s"):
        open_quietly(tmp_path, tracker=hanging)
    assert list(tmp_path.iterdir()) == [] and hanging.abandoned


def test_a_foreign_metrics_file_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("hello\n")
    with pytest.raises(RunDirectoryError, match="not a metric line"):
        open_quietly(tmp_path)


def test_a_mirror_hears_nothing_after_the_end(tmp_path):
    """What is told while mirrors finish must not push out what they still have to write."""
    sink = Blocking()
    mirror = Mirror("slow", sink, queue_lines=2, start_limit_s=5, warn=lambda text: None)
    for step in range(3):
        mirror.put(EventLine(step, 0.0, "note", {}))
        while step == 0 and not sink.lines:  # it holds the first
            threading.Event().wait(0.01)
    mirror.finish("finished")
    mirror.put(EventLine(9, 0.0, "closed", {}))
    sink.released.set()
    mirror.join(10)
    assert [line.step for line in sink.lines] == [0, 1, 2] and mirror.dropped == 0


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


def test_a_run_whose_name_is_no_text_has_a_report(tmp_path):
    run_dir = tmp_path / b"caf\xe9".decode("utf-8", "surrogateescape")
    open_quietly(run_dir).close()
    assert "caf?: paceline run" in write_report(run_dir).read_text(encoding="utf-8")
