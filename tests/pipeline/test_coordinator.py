"""The coordinator with real processes: windows never depend on timing, and no failure hangs."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated_stages as stages
from batches import host_batch
from paceline.config import FlowConfig
from paceline.errors import Interrupted, StageError
from paceline.pipeline.coordinator import Coordinator, Saves, Work
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.prefetch import Prefetcher
from paceline.pipeline.process import WorkerProcess
from paceline.pipeline.telemetry import RemoteObserver
from paceline.types import HostBatch, PlannedStep, StepReport, StepTimes


def host(index: int, window: int, replica: int = 0) -> HostBatch:
    rows = [10 * index, 10 * index + 1]
    return host_batch([[index + 1] * 4] * 2, rows=rows, index=index, window=window, replica=replica)


def steps_of(windows: int, accumulate: int, every: int = 1000) -> list[PlannedStep]:
    return [
        PlannedStep(w + 1, 0, w, range(w * accumulate, (w + 1) * accumulate), save=(w + 1) % every == 0)
        for w in range(windows)
    ]


class AsPlanned:
    """Checkpoints where the plan says so."""

    def due(self, planned: PlannedStep) -> bool:
        return planned.save

    def announce(self, step: int) -> dict[str, int]:
        return {}


@contextmanager
def joined(
    *,
    windows: int = 6,
    accumulate: int = 4,
    targets: int = 2,
    drafters: int = 1,
    buffers: int = 3,
    delivery: str = "ordered",
    delay_s: float = 0.004,
    stall_limit_s: float = 60.0,
    target_error: tuple[str, int] = ("", -1),
    drafter_error: tuple[str, int] = ("", -1),
    feed: Iterator[HostBatch] | None = None,
    stop: Callable[[], bool] = lambda: False,
    telemetry: Notes | None = None,
    every: int = 1000,
    saves: Saves | None = None,
    largest: Sequence[HostBatch] = (),
    validation: Sequence[HostBatch] = (),
    outstanding: int = 1,
) -> Iterator[tuple[Coordinator, list[WorkerProcess]]]:
    items = feed or (host(i, i // accumulate, i % drafters) for i in range(windows * accumulate))
    pool = FeaturePool(buffers, 1, 1, torch.float32)
    workers = [
        WorkerProcess(
            f"target {n}", stages.SimulatedTarget, (pool, n, delay_s, *target_error), max_outstanding=outstanding
        )
        for n in range(targets)
    ]
    ranks = [
        WorkerProcess(f"drafter {n}", stages.SimulatedDrafter, (pool, 100 + n, delay_s / 2, *drafter_error))
        for n in range(drafters)
    ]
    prefetcher = Prefetcher(items, 4)
    work = Work(steps_of(windows, accumulate, every), prefetcher, validation, largest)
    flow = FlowConfig(delivery=delivery, stall_limit_s=stall_limit_s)
    try:
        coordinator = Coordinator(
            workers,
            ranks,
            pool,
            work,
            flow,
            saves=saves or AsPlanned(),
            telemetry=telemetry or RemoteObserver(),
            stop_requested=stop,
        )
        yield coordinator, [*workers, *ranks]
    finally:
        prefetcher.close()
        for worker in (*workers, *ranks):
            worker.stop(1.0)


def run(coordinator: Coordinator) -> list[StepReport]:
    return [report for report, _ in coordinator.run()]


def times_of(coordinator: Coordinator) -> list[StepTimes]:
    return [times for _, times in coordinator.run()]


@pytest.mark.parametrize("targets", [1, 3])
def test_ordered_delivery_trains_in_plan_order(targets: int) -> None:
    with joined(targets=targets) as (coordinator, _):
        reports = run(coordinator)
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6]
    assert [list(report.batches) for report in reports] == [list(range(4 * w, 4 * w + 4)) for w in range(6)]


def test_ready_delivery_keeps_windows_whatever_the_timing() -> None:
    with joined(delivery="ready", targets=3, delay_s=0.02, buffers=5, windows=8) as (coordinator, _):
        reports = run(coordinator)
    assert [sorted(report.batches) for report in reports] == [list(range(4 * w, 4 * w + 4)) for w in range(8)]
    assert any(list(report.batches) != sorted(report.batches) for report in reports), "the delays changed no order"


@pytest.mark.parametrize("delivery", ["ordered", "ready"])
@pytest.mark.parametrize(("targets", "drafters", "buffers"), [(3, 2, 4), (2, 3, 9)])
def test_windows_and_ranks_of_batches_never_depend_on_timing(
    delivery: str, targets: int, drafters: int, buffers: int
) -> None:
    """Delays of up to 40 ms a batch and stage, drawn anew for every worker, against windows of 6 micro-batches."""
    with joined(
        delivery=delivery, targets=targets, drafters=drafters, buffers=buffers, accumulate=6, windows=7, delay_s=0.04
    ) as (coordinator, _):
        reports = run(coordinator)
    # Only the first rank's report is passed on; it names what that rank trained.
    expected = [[index for index in range(6 * w, 6 * w + 6) if (index - 6 * w) % drafters == 0] for w in range(7)]
    assert [sorted(report.batches) for report in reports] == expected
    if delivery == "ordered":
        assert [list(report.batches) for report in reports] == expected


def test_replicas_get_their_own_batches_and_all_take_each_step() -> None:
    with joined(drafters=2, buffers=4, windows=3) as (coordinator, _):
        reports = run(coordinator)
    assert [list(report.batches) for report in reports] == [[0, 2], [4, 6], [8, 10]]


class SlowToSay:
    """Saves after the even steps; notes which reports had been taken in by then."""

    def __init__(self) -> None:
        self.taken_in: list[int] = []
        self.announced: list[tuple[int, list[int]]] = []

    def due(self, planned: PlannedStep) -> bool:
        return planned.step % 2 == 0

    def announce(self, step: int) -> dict[str, int]:
        self.announced.append((step, list(self.taken_in)))
        return {"step": step}


@pytest.mark.parametrize("delivery", ["ordered", "ready"])
def test_the_state_is_taken_between_report_and_next_window(delivery: str) -> None:
    """The simulated drafter refuses to save inside a window."""
    saves = SlowToSay()
    with joined(windows=5, targets=3, buffers=5, delivery=delivery, saves=saves) as (coordinator, _):
        for report, _ in coordinator.run():
            saves.taken_in.append(report.step)
    assert saves.announced == [(2, [1, 2]), (4, [1, 2, 3, 4])]
    assert saves.taken_in == [1, 2, 3, 4, 5]


def test_a_stop_saves_the_last_step_that_was_taken() -> None:
    saves = SlowToSay()
    with joined(windows=50, saves=saves, stop=lambda: len(saves.taken_in) >= 3) as (coordinator, _):
        for report, _ in coordinator.run():
            saves.taken_in.append(report.step)
    assert 3 <= saves.taken_in[-1] < 50
    assert saves.announced[-1] == (saves.taken_in[-1], saves.taken_in)


def test_waits_are_reported_for_all_stages() -> None:
    with joined() as (coordinator, _):
        times = times_of(coordinator)
    workers = {f"{s}/{w}" for s in ("target", "drafter") for w in ("busy", "starved", "blocked")}
    assert set(times[-1].waits_s) == workers | {"feed/busy", "feed/blocked"}
    assert times[-1].waits_s["target/busy"] > 0


class Notes:
    """Telemetry that keeps everything."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, float, float]] = []
        self.depths: list[dict[str, float]] = []
        self.told: list[str] = []
        self.gauges: dict[str, list[float]] = {}

    def span(self, process: str, row: str, name: str, start_s: float, end_s: float, **details: object) -> None:
        self.spans.append((process, name, start_s, end_s))

    def counter(self, process: str, name: str, at_s: float, **values: float) -> None:
        self.depths.append(values)

    def note(self, text: str) -> None:
        self.told.append(text)

    def gauge(self, name: str, value: float) -> None:
        self.gauges.setdefault(name, []).append(value)


def test_telemetry_sees_all_work_when_it_was_done() -> None:
    notes = Notes()
    began = time.time()
    with joined(windows=3, telemetry=notes, every=2) as (coordinator, _):
        run(coordinator)
    batches = sorted(f"batch {index}" for index in range(12))
    for stage in ("feed", "target", "drafter"):
        names = [name for process, name, *_ in notes.spans if process.startswith(stage) and name.startswith("batch")]
        assert sorted(names) == batches, stage
    others = [name for process, name, *_ in notes.spans if not name.startswith("batch")]
    assert others == ["optimizer step 1", "optimizer step 2", "checkpoint of step 2", "optimizer step 3"]
    assert all(began <= start <= end <= time.time() for *_, start, end in notes.spans)
    for process in {process for process, *_ in notes.spans if process != "checkpoint"}:
        mine = sorted((start, end) for name, _, start, end in notes.spans if name == process)
        # A worker does one thing at a time; the clocks of spans and durations differ by microseconds.
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(mine)), process
    made, drafted = ({n: t for p, n, *t in notes.spans if p.startswith(stage)} for stage in ("target", "drafter"))
    assert all(made[name][1] <= drafted[name][1] for name in batches)


def test_telemetry_sees_queues_and_memory() -> None:
    notes = Notes()
    with joined(windows=4, buffers=3, telemetry=notes) as (coordinator, _):
        run(coordinator)
    gauges = notes.gauges
    assert len(gauges["queue/free_buffers_items"]) == 4 and max(gauges["queue/free_buffers_items"]) <= 3
    assert [4 * items for items in gauges["queue/free_buffers_items"]] == gauges["queue/free_buffers_bytes"]
    # Every waiting batch of these has 8 real tokens, of 4 bytes a token here.
    assert [32 * items for items in gauges["queue/features_items"]] == gauges["queue/features_bytes"]
    assert gauges["queue/host_batches_items"][-1] == 0
    assert max(depth["free_buffers"] + depth["features"] for depth in notes.depths) <= 3
    for name in ("target_0", "target_1", "drafter_0"):
        assert 1e6 < gauges[f"memory_peak/{name}_bytes"][0] < 1e12


@pytest.mark.parametrize("stage", ["target", "drafter"])
def test_an_exception_names_stage_batch_and_samples(stage: str) -> None:
    with joined(**{f"{stage}_error": ("raise", 5)}) as (coordinator, _), pytest.raises(StageError) as caught:
        run(coordinator)
    text = str(caught.value)
    assert stage in text and "batch 5 of epoch 0 (samples 50, 51)" in text and "a made-up error" in text
    assert "\n" not in text
    assert "Traceback" in caught.value.__notes__[0]


def test_the_largest_batches_run_first_on_all_workers() -> None:
    notes = Notes()
    with joined(targets=3, windows=2, telemetry=notes, largest=[host(77, 9), host(78, 9)]) as (coordinator, _):
        reports = run(coordinator)
    assert [list(report.batches) for report in reports] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(reports[0].ratios) == ["probed_77", "probed_78"]
    assert notes.told == ["features cross with a relative RMS error of 0.25 (flow.transport)"]


def test_validation_batches_are_held_in_order_before_training() -> None:
    notes = Notes()
    with joined(targets=2, windows=2, telemetry=notes, validation=[host(n, 0) for n in (5, 3, 4)]) as (coordinator, _):
        reports = run(coordinator)
    assert list(reports[0].ratios) == ["held_5", "held_3", "held_4"]
    assert [list(report.batches) for report in reports] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    names = [name for process, name, *_ in notes.spans if process == "drafter 0"]
    assert names[:3] == ["validation batch 5", "validation batch 3", "validation batch 4"]


def test_a_validation_batch_that_fails_is_named_as_one() -> None:
    with (
        joined(target_error=("raise", 5), windows=1, validation=[host(5, 0)]) as (coordinator, _),
        pytest.raises(StageError, match=r"target 0 failed on validation batch 5 of epoch 0 .samples 50, 51.: Val"),
    ):
        run(coordinator)


@pytest.mark.parametrize(("error", "stage"), [(("memory", -2), "target"), (("kill", 77), "drafter")])
def test_a_largest_batch_that_does_not_fit_is_named_first(error: tuple[str, int], stage: str) -> None:
    with (
        joined(**{f"{stage}_error": error}, largest=[host(77, 9)]) as (coordinator, _),
        pytest.raises(StageError, match=rf"{stage} 0 .* the memory probe, batch 77 of epoch 0 .samples 770, 771."),
    ):
        run(coordinator)


class LongestDeque(deque[Any]):
    """Keeps how long it ever was."""

    longest = 0

    def append(self, item: Any) -> None:
        super().append(item)
        self.longest = max(self.longest, len(self))


def test_two_tasks_may_be_outstanding_at_a_target() -> None:
    """Each target is sent its second batch before it has answered the first; windows stay as planned."""
    with joined(targets=2, outstanding=2, buffers=6, windows=4, delivery="ready") as (coordinator, workers):
        sent = [LongestDeque(worker.outstanding) for worker in workers[:2]]
        for worker, tasks in zip(workers, sent, strict=False):
            worker.outstanding = tasks
        for report, _ in coordinator.run():
            assert sorted(report.batches) == list(range(4 * (report.step - 1), 4 * report.step))
    assert [tasks.longest for tasks in sent] == [2, 2]


def test_time_without_a_free_buffer_is_blocked_not_starved() -> None:
    """A drafter that needs long holds both buffers: the target waits for one of them, and for nothing else."""
    with joined(targets=1, windows=2, accumulate=4, buffers=2, delay_s=0.0, drafter_error=("slow", 1)) as (
        coordinator,
        _,
    ):
        times = times_of(coordinator)
    waits = times[0].waits_s
    assert waits["target/blocked"] > 0.5 > 5 * waits["target/starved"], waits


def test_every_worker_is_in_every_report() -> None:
    with joined(targets=2, drafters=2, buffers=4, windows=3) as (coordinator, _):
        times = times_of(coordinator)
    assert all(set(taken.workers) == {"target_0", "target_1", "drafter_0", "drafter_1"} for taken in times)
    # A rank may have begun the next window when the other one ends this one: the sums are what is sure.
    for rank in range(2):
        done = [taken.workers[f"drafter_{rank}"] for taken in times]
        assert (sum(totals.batches for totals in done), sum(totals.real_tokens for totals in done)) == (6, 48)
    assert sum(taken.workers[f"target_{n}"].batches for taken in times for n in range(2)) == 12


@pytest.mark.parametrize("stage", ["target", "drafter"])
def test_a_killed_worker_is_named(stage: str) -> None:
    with (
        joined(targets=1, **{f"{stage}_error": ("kill", 5)}) as (coordinator, _),
        pytest.raises(StageError, match=rf"stage {stage} 0 was killed by SIGKILL while working on batch 5"),
    ):
        run(coordinator)


def test_a_killed_fork_server_is_not_blamed_on_a_worker() -> None:
    """Its end looks like that of all workers; nobody knows how theirs was."""
    with joined(windows=40, delay_s=0.05) as (coordinator, workers):
        steps = coordinator.run()
        next(steps)
        server = int(Path(f"/proc/{workers[0].process.pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert server != os.getpid()
        os.kill(server, signal.SIGKILL)
        with pytest.raises(StageError, match="0 ended together with the server that starts all workers"):
            list(steps)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # its socket is closed a moment before it has ended
    with joined(windows=2) as (coordinator, _):
        assert len(run(coordinator)) == 2


@pytest.mark.parametrize("stage", ["target", "drafter"])
def test_a_stuck_worker_is_named(stage: str) -> None:
    with (
        joined(targets=1, stall_limit_s=8.0, **{f"{stage}_error": ("hang", 5)}) as (coordinator, _),
        pytest.raises(StageError, match=rf"stage {stage} 0 has shown no progress .* batch 5 of epoch 0"),
    ):
        run(coordinator)


def test_a_worker_that_cannot_start_is_named() -> None:
    worker = WorkerProcess("target 0 (cuda:9)", stages.cannot_start, ())
    feed, pool = Prefetcher(iter([]), 1), FeaturePool(2, 1, 1, torch.float32)
    work = Work(steps_of(1, 1), feed)
    coordinator = Coordinator([worker], [], pool, work, FlowConfig(), saves=AsPlanned(), telemetry=RemoteObserver())
    try:
        with pytest.raises(StageError, match=r"target 0 .cuda:9. failed on start-up: OSError: no such device"):
            run(coordinator)
    finally:
        feed.close()
        worker.stop(0.0)


def test_a_feed_that_raises_stops_the_run() -> None:
    def broken() -> Iterator[HostBatch]:
        yield host(0, 0)
        raise KeyError("row 7")

    with (
        joined(feed=broken()) as (coordinator, _),
        pytest.raises(StageError, match="stage feed failed: KeyError: 'row 7'"),
    ):
        run(coordinator)


def test_a_stop_ends_after_the_open_window_and_saves() -> None:
    asked = []
    with joined(stop=lambda: bool(asked)) as (coordinator, _):
        steps = []
        for report, _ in coordinator.run():
            steps.append(report.step)
            if report.step == 2:
                asked.append(True)
        assert steps == list(range(1, coordinator.last_step + 1)) and 2 <= coordinator.last_step < 6


def test_a_stop_during_start_up_trains_nothing() -> None:
    with joined(stop=lambda: True) as (coordinator, _), pytest.raises(Interrupted, match="nothing was trained"):
        run(coordinator)


def test_children_end_when_the_parent_dies(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = (
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n"
        "import simulated_stages as stages\n"
        "from paceline.pipeline.process import WorkerProcess\n"
        "if __name__ == '__main__':\n"
        f"    worker = WorkerProcess('target 0', stages.note_pid, ({str(note)!r},))\n"
        "    worker.connection.recv()\n"
        "    os._exit(1)\n"
    )
    path = tmp_path / "parent.py"
    path.write_text(script)
    subprocess.run([sys.executable, str(path)], timeout=60, check=False)
    pid = int(note.read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_too_small_shared_memory_says_what_to_lower() -> None:
    with pytest.raises(StageError, match=r"feature buffers need .* lower plan.token_budget or flow.pool_buffers"):
        FeaturePool(4, 1 << 30, 1 << 14, torch.float32)


def test_workers_are_gone_after_stop() -> None:
    with joined(windows=1) as (coordinator, workers):
        run(coordinator)
        pids = [worker.process.pid for worker in workers]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
