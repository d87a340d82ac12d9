"""Completes step reports with what plan, store and parent know: times, rows, tags, supervised tokens, FLOPs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.config import devices_of
from paceline.run.flops import drafter_flops
from paceline.run.run import Run
from paceline.target_model.layer_costs import layer_costs
from paceline.types import BucketTotals, Ratio, StepReport, StepTimes, TagTotals

MAX_TAGS = 32
"""Tags that are kept apart; rarer ones are put together as ``other`` (``other_`` where a tag has that name)."""

NOTHING = BucketTotals(Ratio(0.0, 0.0), 0, 0, 0, 0, 0)
"""What a bucket that has no micro-batch in a step contributes: logged as 0, so that starvation shows."""


class StepMetrics:
    """Completes step reports.

    Args:
        run: whose plan and store say what a micro-batch holds.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._supervised = run.source.supervised
        self._tags, self._codes, self._members = tag_table(run.source.names())
        flow, peaks = run.settings.flow, run.settings.observe.peak_tflops
        self._peaks = {
            stage: sum(found) * 1e12 * run.nodes.here.count
            for stage, entries in (("target", flow.target_devices), ("drafter", flow.drafter_devices))
            if (devices := [name for entry in entries for name in devices_of(entry)])
            and all(found := [peaks.get(name, peaks.get(name.partition(":")[0], 0.0)) for name in devices])
        }
        costs = layer_costs(run.settings.target) if "target" in self._peaks else None
        deepest = run.facts.num_layers if run.settings.objective.needs_teacher else max(run.taps) + 1
        self._layers = (costs or [])[:deepest]
        """What the target's layers cost, up to the last one that is run; empty where that is not known."""

    def __call__(self, report: StepReport, times: StepTimes) -> StepReport:
        """The learner's report with its times, its rows, its tags' totals, and the ratios that follow from them."""
        plan = self._run.plan.epoch(report.epoch)
        by_batch = {index: plan.batch(index).rows for index in report.batches}
        rows = np.concatenate([*by_batch.values(), np.zeros(0, np.int64)])
        slots = report.ratios.get("accuracy/all", Ratio(0.0, 0.0)).denominator
        ratios = dict(report.ratios) | {"coverage/supervised": Ratio(slots, float(self._supervised[rows].sum()))}
        ratios |= self._used(rows, report.seconds)
        buckets = {bucket: report.buckets.get(bucket, NOTHING) for bucket in range(len(plan.edges))}
        return replace(
            report,
            ratios=ratios,
            buckets=buckets,
            rows=by_batch,
            tags=self._by_tag(by_batch, report),
            waits_s=times.waits_s,
            workers=times.workers,
        )

    def _by_tag(self, by_batch: dict[int, np.ndarray], report: StepReport) -> dict[str, TagTotals]:
        if not self._tags or any(index not in report.sample_losses for index in by_batch):
            return {}
        codes = self._codes[np.concatenate(list(by_batch.values()))]
        losses = np.concatenate([report.sample_losses[index] for index in by_batch])
        columns = (np.ones(len(codes)), losses[:, 0], losses[:, 1])
        counts, loss, weight = (np.bincount(codes, column, len(self._members)) @ self._members for column in columns)
        return {
            tag: TagTotals(Ratio(float(loss[place]), float(weight[place])), round(counts[place]))
            for place, tag in enumerate(self._tags)
        }

    def _used(self, rows: np.ndarray, seconds: float) -> dict[str, Ratio]:
        """FLOPs of the step / what the devices of a stage could have done in its time."""
        if not self._peaks:
            return {}
        run = self._run
        lengths = run.source.lengths[rows]
        anchors = np.minimum(run.source.eligible[rows], run.settings.drafter.num_anchors)
        flops = {
            "target": sum(layer.flops(lengths) for layer in self._layers),
            "drafter": drafter_flops(run.spec, lengths, anchors),
        }
        return {
            f"speed/mfu_{stage}": Ratio(flops[stage], seconds * peak)
            for stage, peak in self._peaks.items()
            if flops[stage]
        }


def tag_table(names: Sequence[Sequence[str]]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Which rows carry which tags, where tags tell rows apart at all.

    Args:
        names: of every row, its tags and, last, its source file.

    Returns:
        T tags as metric names hold them (a source is ``source:FILE``), a code for every row, int32 [num_rows], and
        which tags a code means, float64 [codes, T].
    """
    kinds: dict[tuple[str, ...], int] = {}
    codes = np.array([kinds.setdefault(tuple(row), len(kinds)) for row in names], dtype=np.int32)
    rows_of = np.bincount(codes, minlength=len(kinds))
    labels = [{*map(_plain, kind[:-1]), f"source:{_plain(Path(kind[-1]).name)}"} for kind in kinds]
    counts: Counter[str] = Counter()
    for kind, found in enumerate(labels):
        counts.update(dict.fromkeys(found, int(rows_of[kind])))
    telling = [tag for tag, count in counts.most_common() if count < len(names)]
    rest = "other"
    while rest in telling:  # somebody's own tag
        rest += "_"
    tags = telling if len(telling) <= MAX_TAGS else [*telling[: MAX_TAGS - 1], rest]
    members = np.zeros((len(kinds), len(tags)))
    for kind, found in enumerate(labels):
        for tag in found & set(telling):
            members[kind, tags.index(tag) if tag in tags else len(tags) - 1] = 1.0
    return tags, codes, members


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.:-]+", "_", name) or "_"
