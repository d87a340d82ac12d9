"""The observer: what a run measures goes in here and comes out at metrics.jsonl, the console and the trackers."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.config import ObserveConfig
from paceline.errors import RunDirectoryError, TrackerError
from paceline.observe.aggregate import LineAggregator
from paceline.observe.alerts import Alerts
from paceline.observe.console import View, open_view
from paceline.observe.diagnosis.diagnose import LiveDiagnosis
from paceline.observe.diagnosis.optimizer import SpikeWatch
from paceline.observe.metrics_file import (
    FORMAT,
    MAX_GAPS,
    METRICS_FILE,
    EventLine,
    HeaderLine,
    MetricsFile,
    StepLine,
    gap_text,
)
from paceline.observe.micro_batch_file import MICRO_BATCHES_FILE, MicroBatchFile, micro_batch_lines
from paceline.observe.trace import TRACE_FILE, TraceFile
from paceline.observe.trackers import TrackerContext, wanted
from paceline.observe.trackers.tracker_process import Tracker
from paceline.terminal import PlainConsole
from paceline.text import masked, masked_values
from paceline.types import StepReport

_STATM = Path("/proc/self/statm")
"""Pages of this process; the second number is what is in memory."""
_SPEED_MEMORY = 0.9
"""How much of the recent seconds per step survives one more step; about the last ten steps count."""


def open_observer(
    settings: ObserveConfig,
    run_dir: Path,
    *,
    total_steps: int,
    header: dict[str, Any],
    first_step: int = 0,
    console: Console | None = None,
) -> Observer:
    """Start everything that is shown, written or sent. Nothing is written before every tracker has started.

    Args:
        settings: what is on.
        run_dir: directory of the run; made if it is not there.
        total_steps: optimizer steps planned.
        header: facts of the run, written into metrics.jsonl and the trackers' configuration; ``samples_per_epoch`` in
            it gives the epoch coverage, ``bucket_edges`` (longest length of each bucket) names the buckets in the
            report.
        first_step: step of the checkpoint that the run resumes from; later lines of metrics.jsonl are cut off.
        console: where progress goes; standard error if unset.

    Raises:
        TrackerError: a tracker cannot start, or there is no such alert command.
        RunDirectoryError: the directory or metrics.jsonl cannot be written, or is something else.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{run_dir}: cannot be made ({error.strerror}); give another run_dir") from error
    console = console or PlainConsole(stderr=True)
    observer = Observer(settings, run_dir, console, total_steps=total_steps, header=header, first_step=first_step)
    try:
        observer.open()
    except (TrackerError, RunDirectoryError):
        observer.close("failed: the run did not start")
        raise
    return observer


class Observer:
    """Takes in step reports, gauges and events. Made by `open_observer`; all methods but `close` return at once."""

    def __init__(
        self,
        settings: ObserveConfig,
        run_dir: Path,
        console: Console,
        *,
        total_steps: int,
        header: dict[str, Any],
        first_step: int,
    ) -> None:
        self._settings = settings
        self._console = console
        self._view = View(console)
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._header = masked_values(header)
        self._step = first_step
        self._totals: dict[str, float] = {}
        self._lines = LineAggregator(self._totals)
        self._trackers: list[Tracker] = []
        self._alerts: Alerts | None = None
        self._file: MetricsFile | None = None
        self._trace: TraceFile | None = None
        self._micro_batches: MicroBatchFile | None = None
        self._diagnosis = LiveDiagnosis(run_dir, settings.diagnose_every_steps, total_steps, first_step)
        self._spikes = SpikeWatch(total_steps)
        self._newest: dict[str, tuple[int, float]] = {}
        self._recent_s: float | None = None
        self._epoch = -1
        self._epoch_samples: float | None = 0.0
        self._gap = False
        self._last_report: StepReport | None = None

    def open(self) -> None:
        """Start trackers, then the files, then the view; called once, by `open_observer`."""
        settings, context = self._settings, TrackerContext(self._settings, self._run_dir, self._header, self._step)
        for name in wanted(settings):
            self._trackers.append(Tracker(name, context, self.warn))
        if settings.alert_command:
            self._alerts = Alerts(settings, self._run_dir, self.warn)
        if settings.trace:
            self._trace = TraceFile(self._run_dir / TRACE_FILE)
        if settings.micro_batches:
            self._micro_batches = MicroBatchFile(self._run_dir / MICRO_BATCHES_FILE, self._step)
        begins = self._header.get("begins", {}).get("step", 0)
        self._file = MetricsFile(self._run_dir / METRICS_FILE, self._step, begins)
        before = self._file.last_step_line
        written = before.step if before is not None else begins
        self._gap = written < self._step
        if before is not None:
            self._recent_s = before.values.get("speed/seconds_per_step")
            self._totals |= {
                name: value for name, value in before.values.items() if name.startswith("total_") and value
            }
            if not self._gap:
                self._epoch, self._epoch_samples = before.epoch, before.values.get("progress/epoch_samples")
        self._file.append(HeaderLine(self._step, time.time(), FORMAT, self._total_steps, self._header))
        self._view = open_view(settings, self._console, total_steps=self._total_steps, first_step=self._step)
        gaps = [*self._file.gaps, *([(written + 1, self._step)] if self._gap else [])]
        for first, last in gaps[:MAX_GAPS]:
            self.warn(gap_text(first, last))

    def step(self, report: StepReport) -> None:
        """Take in one optimizer step.

        Raises:
            MetricError: the report has a ratio that the catalogue does not know.
            RunDirectoryError: metrics.jsonl can no longer be written.
        """
        if report.epoch != self._epoch:
            self._flush()  # a line ends with its epoch, so that the epoch's coverage is whole
            # After a gap in the metrics, what came before in this epoch is unknown.
            self._epoch, self._epoch_samples = report.epoch, None if self._gap and report.window else 0.0
        self._gap = False
        self._lines.add(report)
        self._step = report.step
        self._last_report = report
        if self._epoch_samples is not None:
            self._epoch_samples += report.samples
        previous = report.seconds if self._recent_s is None else self._recent_s
        self._recent_s = _SPEED_MEMORY * previous + (1 - _SPEED_MEMORY) * report.seconds
        losses = None
        if self._micro_batches is not None:
            lines = list(micro_batch_lines(report))
            self._micro_batches.write(lines)
            losses = {line["batch"]: line["loss"] for line in lines}
        self._draw(lambda trace: trace.step(report, time.time(), losses))
        spike = self._spikes.see(report)
        if spike is not None:
            self._event("gradient-spike", spike)
        self._view.advance(report.step)
        if report.step % self._settings.every_steps == 0 or report.step >= self._total_steps:
            self._flush()

    def gauge(self, name: str, value: float) -> None:
        """Set a value that is read rather than counted (queue depth, memory); it goes out with the next line.

        Raises:
            MetricError: the name is not in the catalogue, or is counted rather than read.
        """
        self._lines.gauge(name, value)

    def span(self, process: str, row: str, name: str, start_s: float, end_s: float, **details: Any) -> None:
        """Draw a span into the trace, where one is written; see `paceline.observe.trace.TraceFile.span`."""
        self._draw(lambda trace: trace.span(process, row, name, start_s, end_s, **details))

    def counter(self, process: str, name: str, at_s: float, **values: float) -> None:
        """Draw values at one moment into the trace, where one is written."""
        self._draw(lambda trace: trace.counter(process, name, at_s, **values))

    def event(self, kind: str, **fields: Any) -> None:
        """Write down something that happened, such as ``checkpoint``; the steps before it go out first.

        Call it before every checkpoint: then lines end there, are on the disk, and resuming loses none.
        """
        self._flush()
        self._event(kind, fields)
        if kind == "checkpoint" and self._file is not None:
            self._file.sync()

    def newest(self, name: str) -> tuple[int, float] | None:
        """Step and value of a metric where this start has written it last; None where it has not."""
        return self._newest.get(name)

    def lost(self) -> str | None:
        """What somebody has done to metrics.jsonl while this run writes it; None where it is as it must be."""
        return self._file.lost() if self._file is not None else None

    def note(self, text: str) -> None:
        """Show something to the user, and write it down."""
        self._event("note", {"text": text})
        self._view.note(masked(text))

    def warn(self, text: str) -> None:
        """Show the user something to look at, and write it down."""
        self._event("warning", {"text": text})
        self._view.warn(masked(text))

    def close(self, status: str = "finished") -> None:
        """Write what is left, end the trackers within their limit, release the terminal. A second call does nothing.

        Args:
            status: how the run ended: ``finished``, ``interrupted`` or ``failed: why``.
        """
        self._flush()
        for tracker in self._trackers:
            tracker.finish(status)
        if self._file is not None and self._alerts is not None:
            self._alerts.close(status, self._step)
        deadline = time.monotonic() + self._settings.tracker_close_limit_s
        for tracker in self._trackers:
            tracker.join(deadline)
        dropped = {tracker.name: tracker.dropped for tracker in self._trackers if tracker.dropped}
        self._trackers, self._alerts = [], None
        self._draw(lambda trace: trace.close())
        self._trace = None
        if self._micro_batches is not None:
            self._micro_batches.close()
            self._micro_batches = None
        if self._file is None:
            return
        self._event("closed", {"status": status} | ({"dropped_lines": dropped} if dropped else {}))
        self._file.close()
        self._file = None
        self._view.close(masked(status))

    def _flush(self) -> None:
        report = self._last_report
        if not self._lines.steps or report is None:
            return
        self._progress()
        values, weights = self._lines.values()
        line = StepLine(
            step=report.step,
            time=time.time(),
            steps=self._lines.steps,
            epoch=report.epoch,
            window=report.window,
            batches=self._lines.batches,
            values=values,
            weights=weights,
        )
        self._lines = LineAggregator(self._totals)
        self._newest |= {name: (line.step, value) for name, value in values.items()}
        self._send(line)
        self._view.show(line)
        for finding in self._diagnosis.see(line):
            self.warn(finding.sentence)

    def _draw(self, call: Callable[[TraceFile], None]) -> None:
        """Add to the trace; one that can no longer be written is dropped, the run continues without it."""
        if self._trace is None:
            return
        try:
            call(self._trace)
        except RunDirectoryError as error:
            self._trace = None
            self.warn(f"the trace is dropped: {error}")

    def _progress(self) -> None:
        gauge = self._lines.gauge
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        gauge("memory_peak/trainer_bytes", peak if sys.platform == "darwin" else peak * 1024)
        if _STATM.exists():  # Linux
            gauge("memory/trainer_bytes", int(_STATM.read_text().split()[1]) * resource.getpagesize())
        if self._total_steps > 0:
            gauge("progress/share", self._step / self._total_steps)
        if self._recent_s is not None:
            gauge("progress/time_left_s", self._recent_s * max(self._total_steps - self._step, 0))
        if self._epoch_samples is None:
            return
        gauge("progress/epoch_samples", self._epoch_samples)
        samples = self._header.get("samples_per_epoch")
        if samples:
            gauge("progress/epoch_coverage", self._epoch_samples / samples)

    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        line = EventLine(step=self._step, time=time.time(), event=kind, fields=masked_values(fields))
        self._diagnosis.note(line)
        self._send(line)

    def _send(self, line: StepLine | EventLine) -> None:
        if self._file is not None:
            self._file.append(line)
        if self._alerts is not None:
            self._alerts.see(line)
        for tracker in self._trackers:  # a tracker may warn, and a warning is an event that comes here again
            tracker.put(line)
