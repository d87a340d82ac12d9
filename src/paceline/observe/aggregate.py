"""From step reports to the values of one metric line, each reduced as the catalogue says.

Ratios keep numerator and denominator, so a line over ten steps holds what one step over the same samples would have
held.
"""

from __future__ import annotations

import math

from paceline.errors import MetricError
from paceline.observe.catalogue import find
from paceline.types import BucketTotals, Ratio, StepReport

MOSTLY = 0.75
"""Share of a step's micro-batches from which on a step is mostly of one bucket."""


class LineAggregator:
    """Metrics of the optimizer steps since the last line.

    Args:
        totals: counts since the run began, by name; the steps of this line are added to it.
    """

    def __init__(self, totals: dict[str, float] | None = None) -> None:
        self._totals = {} if totals is None else totals
        self.steps = 0
        self.seconds = 0.0
        self.batches: list[int] = []
        self._numerators: dict[str, float] = {}
        self._denominators: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def add(self, report: StepReport) -> None:
        """Take in one optimizer step.

        Raises:
            MetricError: a ratio whose name is not in the catalogue.
        """
        self.steps += 1
        self.seconds += report.seconds
        self.batches.extend(report.batches)
        for name, ratio in report.ratios.items():
            self._given(name, ratio)
        self._headline(report)
        self._optimizer(report)
        self._window(report)
        micro_batches = _micro_batches(report)
        for bucket, totals in report.buckets.items():
            self._bucket(bucket, totals, report.loss.denominator, micro_batches)
        for tag, of_tag in report.tags.items():
            if of_tag.samples:
                self._ratio(f"loss/tag_{tag}", of_tag.loss.numerator, of_tag.loss.denominator)
            self._ratio(f"weight_share/tag_{tag}", of_tag.loss.denominator, report.loss.denominator)
            self._sum(f"samples/tag_{tag}", of_tag.samples)
        self._stages(report)
        for worker, done in report.workers.items():
            self._sum(f"worker/{worker}/batches", done.batches)
            self._ratio(f"worker/{worker}/real_tokens_per_s", done.real_tokens, report.seconds)
            self._ratio(f"worker/{worker}/busy", done.busy_s, report.seconds)

    def gauge(self, name: str, value: float) -> None:
        """Set a value that is read rather than counted, such as a queue depth.

        Raises:
            MetricError: the name is not in the catalogue, or is counted rather than read.
        """
        reduction = find(name).reduction
        if reduction == "last":
            self._last[name] = value
        elif reduction == "max":
            self._maxima[name] = max(value, self._maxima.get(name, -math.inf))
        else:
            raise MetricError(f"{name}: reduces as {reduction}, so it cannot be given as a single value")

    def values(self) -> tuple[dict[str, float], dict[str, float]]:
        """Value by name, and denominator by name for those that are ratios."""
        # A bucket or tag that is not in every step still has its share of all of them.
        whole = self._denominators.get("loss", 0.0)
        denominators = {
            name: whole if name.startswith("weight_share/") else weight for name, weight in self._denominators.items()
        }
        values = {name: _divide(total, denominators[name]) for name, total in self._numerators.items()}
        values.update({name: total / max(self.steps, 1) for name, total in self._sums.items()})
        values.update(self._maxima)
        values.update(self._last)
        values.update(self._totals)
        return values, denominators

    def _given(self, name: str, ratio: Ratio) -> None:
        reduction = find(name).reduction
        if reduction == "ratio":
            self._ratio(name, ratio.numerator, ratio.denominator)
        elif reduction == "per_step":
            self._sum(name, ratio.value)
        else:
            self.gauge(name, ratio.value)

    def _headline(self, report: StepReport) -> None:
        self._ratio("loss", report.loss.numerator, report.loss.denominator)
        for name, ratio in report.ratios.items():
            if name in ("acceptance/streak", "validation/acceptance/streak") or name.startswith("tree/streak_"):
                tau = name.replace("acceptance/streak", "tau").replace("tree/streak", "tree/tau")
                self._ratio(tau, ratio.numerator + ratio.denominator, ratio.denominator)
        self._last["learning_rate"] = report.learning_rate
        self._ratio("real_tokens_per_s", report.real_tokens, report.seconds)
        self._ratio("draft_positions_per_s", report.draft_positions, report.seconds)
        self._ratio("padding_efficiency", report.real_tokens, report.padded_tokens)
        self._ratio("speed/padded_tokens_per_s", report.padded_tokens, report.seconds)
        self._ratio("speed/samples_per_s", report.samples, report.seconds)
        self._ratio("speed/seconds_per_step", report.seconds, 1)

    def _optimizer(self, report: StepReport) -> None:
        if not report.skipped:
            self._ratio("gradient/norm", report.gradient_norm, 1)
            self.gauge("gradient/norm_max", report.gradient_norm)
        self._ratio("gradient/clipped", report.clipped, 1)
        self._ratio("gradient/skipped", report.skipped, 1)
        self._last["progress/epoch"] = report.epoch
        self._last["progress/window"] = report.window

    def _stages(self, report: StepReport) -> None:
        """Shares of a stage's time: the step's wall time, or the sum of its states where several workers add up."""
        states: dict[str, dict[str, float]] = {}
        for place, spent_s in report.waits_s.items():
            stage, _, state = place.rpartition("/")
            states.setdefault(stage, {})[state] = spent_s
        for stage, spent in states.items():
            if "busy" not in spent:
                spent["busy"] = max(report.seconds - sum(spent.values()), 0.0)
            whole = max(report.seconds, sum(spent.values()))
            for state, spent_s in spent.items():
                self._ratio(f"stage/{stage}/{state}", spent_s, whole)

    def _window(self, report: StepReport) -> None:
        micro_batches, buckets = _micro_batches(report), _distinct(report)
        self._sum("window/micro_batches", micro_batches)
        for name in ("samples", "anchors", "real_tokens", "padded_tokens", "draft_positions"):
            self._sum(f"window/{name}", getattr(report, name))
        self._sum("window/buckets", buckets)
        if micro_batches > 1 and buckets:
            self._ratio("window/one_bucket", buckets == 1, 1)
        self._ratio("window/mean_length", report.real_tokens, report.samples)
        if report.samples and report.real_tokens > 0:
            length = math.log2(report.real_tokens / report.samples)
            # A short window at the end of an epoch counts as much less as it is shorter.
            self._ratio("window/log2_length", micro_batches * length, micro_batches)
            self._ratio("window/log2_length_squared", micro_batches * length**2, micro_batches)
        self._ratio("window/samples_per_micro_batch", report.samples, micro_batches)
        if report.max_length:
            self.gauge("window/max_length", report.max_length)

    def _bucket(self, bucket: int, totals: BucketTotals, weight: float, micro_batches: int) -> None:
        """A bucket's share of a step of so much weight and so many micro-batches."""
        if totals.samples:
            self._ratio(f"loss/bucket_{bucket}", totals.loss.numerator, totals.loss.denominator)
        self._ratio(f"weight_share/bucket_{bucket}", totals.loss.denominator, weight)
        for name in ("samples", "micro_batches", "anchors", "real_tokens", "padded_tokens"):
            self._sum(f"{name}/bucket_{bucket}", getattr(totals, name))
        self._sum(f"steps_with/bucket_{bucket}", totals.micro_batches > 0)
        self._sum(f"steps_mostly/bucket_{bucket}", micro_batches > 1 and totals.micro_batches >= MOSTLY * micro_batches)
        for name in ("samples", "real_tokens"):
            total = f"total_{name}/bucket_{bucket}"
            self._totals[total] = self._totals.get(total, 0.0) + getattr(totals, name)

    def _ratio(self, name: str, numerator: float, denominator: float) -> None:
        find(name)
        self._numerators[name] = self._numerators.get(name, 0.0) + numerator
        self._denominators[name] = self._denominators.get(name, 0.0) + denominator

    def _sum(self, name: str, value: float) -> None:
        find(name)
        self._sums[name] = self._sums.get(name, 0.0) + value


def _micro_batches(report: StepReport) -> int:
    return sum(totals.micro_batches for totals in report.buckets.values()) or len(report.batches)


def _distinct(report: StepReport) -> int:
    return sum(totals.micro_batches > 0 for totals in report.buckets.values())


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
