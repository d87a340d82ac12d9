"""The observer: what a run measures goes in here and comes out at metrics.jsonl, the console and the mirrors."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.config import ObserveConfig
from paceline.errors import PacelineError, RunDirectoryError, TrackerError
from paceline.observe.aggregate import LineAggregator
from paceline.observe.alerts import Alerts
from paceline.observe.console import View, open_view
from paceline.observe.diagnosis.gradient_spikes import SpikeWatch
from paceline.observe.live_diagnosis import Watch
from paceline.observe.metrics_file import FORMAT, METRICS_FILE, EventLine, HeaderLine, MetricsFile, StepLine, gap_text
from paceline.observe.trace import TRACE_FILE, TraceFile
from paceline.observe.trackers import SinkContext, wanted
from paceline.observe.trackers.isolated import IsolatedSink
from paceline.observe.trackers.mirror import Mirror, Sink
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
    sinks: Mapping[str, Sink] | None = None,
) -> Observer:
    """Start everything that listens to a run. Nothing is written before every mirror has started.

    Args:
        settings: what is on.
        run_dir: directory of the run; made if it is not there.
        total_steps: optimizer steps planned.
        header: facts of the run, written into metrics.jsonl and the mirrors' configuration; ``samples_per_epoch`` in it
            gives the epoch coverage, ``bucket_edges`` (longest length of each bucket) names the buckets in the report.
        first_step: step of the checkpoint that the run goes on from; later lines of metrics.jsonl are cut off.
        console: where progress goes; standard error if unset.
        sinks: further mirrors by name, beside those that the settings ask for.

    Raises:
        TrackerError: a mirror cannot start.
        RunDirectoryError: metrics.jsonl cannot be written or is something else.
    """
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    context = SinkContext(settings=settings, run_dir=run_dir, header=header, first_step=first_step)
    observer = Observer(settings, run_dir, total_steps=total_steps, header=header, first_step=first_step)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in wanted(settings):
            observer._add_mirror(name, IsolatedSink(name, context))
        if settings.alert_command or settings.alert_webhook is not None:
            observer._alerts = Alerts(settings, run_dir, first_step, observer.warn)
            observer._add_mirror("alerts", observer._alerts)
        for name, sink in (sinks or {}).items():
            observer._add_mirror(name, sink)
        observer._begin(console)
    except OSError as error:
        observer._abandon()
        if isinstance(error, PacelineError):
            raise
        raise TrackerError(f"{run_dir}: cannot be made ({error.strerror}); give another run_dir") from error
    except PacelineError:
        observer._abandon()
        raise
    return observer


class Observer:
    """Takes in step reports, gauges and events. Made by `open_observer`; all methods but `close` return at once."""

    def __init__(
        self, settings: ObserveConfig, run_dir: Path, *, total_steps: int, header: dict[str, Any], first_step: int
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._header = header
        self._step = first_step
        self._tally = LineAggregator()
        self._lock = threading.Lock()
        self._mirrors: list[Mirror] = []
        self._file: MetricsFile | None = None
        self._view: View | None = None
        self._watch: Watch | None = None
        self._alerts: Alerts | None = None
        self._trace: TraceFile | None = None
        self._early_warnings: list[str] = []
        self._newest: dict[str, tuple[int, float]] = {}
        self._recent_s: float | None = None
        self._epoch = -1
        self._epoch_samples: float | None = 0.0
        self._gap = False
        self._last_report: StepReport | None = None
        self._spikes = SpikeWatch(total_steps)

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
        self._tally.add(report)
        self._step = report.step
        self._last_report = report
        if self._epoch_samples is not None:
            self._epoch_samples += report.samples
        previous = report.seconds if self._recent_s is None else self._recent_s
        self._recent_s = _SPEED_MEMORY * previous + (1 - _SPEED_MEMORY) * report.seconds
        self._draw(lambda trace: trace.step(report, time.time()))
        spike = self._spikes.see(report)
        if spike is not None:
            self._event("gradient-spike", spike)
        if self._view is not None:
            self._view.advance(report.step)
        if self._alerts is not None:
            self._alerts.passed(report.step)
        if report.step % self._settings.every_steps == 0 or report.step >= self._total_steps:
            self._flush()

    def gauge(self, name: str, value: float) -> None:
        """Set a value that is read rather than counted (queue depth, memory); it goes out with the next line.

        Raises:
            MetricError: the name is not in the catalogue, or is counted rather than read.
        """
        self._tally.gauge(name, value)

    def span(self, process: str, row: str, name: str, start_s: float, end_s: float, **details: Any) -> None:
        """Draw a span into the trace, where one is written; see `paceline.observe.trace.TraceFile.span`."""
        if self._trace is not None:
            self._draw(lambda trace: trace.span(process, row, name, start_s, end_s, **details))

    def counter(self, process: str, name: str, at_s: float, **values: float) -> None:
        """Draw values at one moment into the trace, where one is written."""
        if self._trace is not None:
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

    def note(self, text: str) -> None:
        """Tell the user something, and write it down."""
        self._event("note", {"text": text})
        if self._view is not None:
            self._view.note(text)

    def warn(self, text: str) -> None:
        """Tell the user something to look at, and write it down. May be called from any thread."""
        if self._view is None:
            self._early_warnings.append(text)
            return
        self._event("warning", {"text": text})
        self._view.warn(text)

    def close(self, status: str = "finished") -> None:
        """Write what is left, end the mirrors within their limit, release the terminal. A second call does nothing.

        Args:
            status: how the run ended: ``finished``, ``interrupted`` or ``failed: why``.
        """
        if self._file is None:
            return
        self._flush()
        for mirror in self._mirrors:
            mirror.finish(status)
        deadline = time.monotonic() + self._settings.mirror_close_limit_s
        for mirror in self._mirrors:
            mirror.join(max(deadline - time.monotonic(), 0.0))
        dropped = {mirror.name: mirror.dropped for mirror in self._mirrors if mirror.dropped}
        self._event("closed", {"status": status} | ({"dropped_lines": dropped} if dropped else {}))
        if self._view is not None:
            self._view.close(status)
        self._draw(lambda trace: trace.close())
        self._trace = None
        with self._lock:
            self._file.close()
            self._file = None

    def _add_mirror(self, name: str, sink: Sink) -> None:
        settings = self._settings
        self._mirrors.append(
            Mirror(
                name,
                sink,
                queue_lines=settings.mirror_queue_lines,
                start_limit_s=settings.mirror_start_limit_s,
                warn=self.warn,
            )
        )

    def _begin(self, console: Console) -> None:
        self._file = MetricsFile(self._run_dir / METRICS_FILE, self._step)
        before = self._file.last_step_line
        written = before.step if before is not None else 0
        self._gap = written < self._step
        if before is not None and not self._gap:
            self._epoch = before.epoch
            self._epoch_samples = before.values.get("progress/epoch_samples")
        if before is not None:
            self._recent_s = before.values.get("speed/seconds_per_step")
        header = HeaderLine(self._step, time.time(), FORMAT, self._total_steps, self._header)
        self._file.append(header)
        if self._settings.trace:
            self._trace = TraceFile(self._run_dir / TRACE_FILE)
        self._watch = Watch(self._run_dir, header, self._settings.diagnose_every_steps)
        self._view = open_view(self._settings, console, total_steps=self._total_steps, first_step=self._step)
        if self._gap:
            self.note(gap_text(written + 1, self._step))
        for text in self._early_warnings:
            self.warn(text)

    def _abandon(self) -> None:
        for mirror in self._mirrors:
            mirror.finish("failed: the run did not start")
        for mirror in self._mirrors:
            mirror.join(self._settings.mirror_close_limit_s)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        report = self._last_report
        if not self._tally.steps or report is None:
            return
        self._progress()
        values, weights = self._tally.values()
        line = StepLine(
            step=report.step,
            time=time.time(),
            steps=self._tally.steps,
            epoch=report.epoch,
            window=report.window,
            batches=self._tally.batches,
            values=values,
            weights=weights,
        )
        self._tally = LineAggregator()
        self._newest |= {name: (line.step, value) for name, value in values.items()}
        self._send(line)
        if self._view is not None:
            self._view.show(line)
        for finding in self._watch.see(line) if self._watch is not None else ():
            self.warn(finding.sentence)

    def _draw(self, call: Callable[[TraceFile], None]) -> None:
        """Add to the trace; one that can no longer be written is dropped, for it is no more than a mirror."""
        if self._trace is None:
            return
        try:
            call(self._trace)
        except RunDirectoryError as error:
            self._trace = None
            self.warn(f"the trace is dropped: {error}")

    def _progress(self) -> None:
        gauge = self._tally.gauge
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
        line = EventLine(step=self._step, time=time.time(), event=kind, fields=fields)
        if self._watch is not None:
            self._watch.hear(line)
        self._send(line)

    def _send(self, line: StepLine | EventLine) -> None:
        with self._lock:
            if self._file is not None:
                self._file.append(line)
        for mirror in self._mirrors:  # outside the lock: a mirror that overflows warns, and a warning is an event
            mirror.put(line)
