"""Step reports built from samples, so that every number can be recounted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.types import BucketTotals, Ratio, StepReport


@dataclass(frozen=True)
class Sample:
    """One trained sample: its bucket, length, loss and anchors."""

    bucket: int
    length: int
    loss: float
    anchors: int


def report_of(step: int, samples: Sequence[Sample], *, block: int = 4, seconds: float = 0.5, **changes) -> StepReport:
    """The report of a step in which each bucket's samples formed one micro-batch."""
    buckets = {}
    for bucket in sorted({sample.bucket for sample in samples}):
        mine = [sample for sample in samples if sample.bucket == bucket]
        width = max(sample.length for sample in mine)
        buckets[bucket] = BucketTotals(
            loss=Ratio(sum(s.loss * s.anchors for s in mine), sum(s.anchors for s in mine)),
            micro_batches=1,
            samples=len(mine),
            anchors=sum(s.anchors for s in mine),
            real_tokens=sum(s.length for s in mine),
            padded_tokens=width * len(mine),
        )
    anchors = sum(s.anchors for s in samples)
    fields = {
        "step": step,
        "epoch": 0,
        "window": step - 1,
        "loss": Ratio(sum(s.loss * s.anchors for s in samples), anchors),
        "ratios": {
            "acceptance/streak": Ratio(1.5 * anchors, anchors),
            "accuracy/slot_1": Ratio(0.7 * anchors, anchors),
            "accuracy/slot_2": Ratio(0.5 * anchors, anchors),
            "accuracy/slot_3": Ratio(0.3 * anchors, anchors),
            "acceptance/slot_1": Ratio(0.7 * anchors, anchors),
        },
        "buckets": buckets,
        "batches": list(range(len(buckets))),
        "gradient_norm": 0.5,
        "clipped": False,
        "skipped": False,
        "learning_rate": 1e-3,
        "samples": len(samples),
        "anchors": anchors,
        "real_tokens": sum(t.real_tokens for t in buckets.values()),
        "padded_tokens": sum(t.padded_tokens for t in buckets.values()),
        "draft_positions": anchors * block,
        "seconds": seconds,
        "waits_s": {"target/busy": seconds * 0.8, "target/blocked": seconds * 0.2, "drafter/busy": seconds * 0.4},
        "max_length": max((s.length for s in samples), default=0),
    }
    return StepReport(**{**fields, **changes})


def random_samples(rng: np.random.Generator, count: int = 12) -> list[Sample]:
    """Samples of four buckets whose loss falls with length."""
    lengths = rng.integers(8, 512, size=count)
    return [
        Sample(int(np.searchsorted([64, 128, 256], n)), int(n), float(4 - n / 256 + rng.normal() / 10), int(n // 8 + 1))
        for n in lengths
    ]
