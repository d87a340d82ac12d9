"""Sums of a window, kept on the device and fetched once: loss, weights, accuracy, acceptance.

Shape letters: A anchors, J drafts of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.types import BucketTotals, HostBatch, Ratio


@dataclass(slots=True)
class BucketCounts:
    """Host counters of one bucket."""

    micro_batches: int = 0
    samples: int = 0
    anchors: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0

    def add(self, other: BucketCounts) -> None:
        """Add the counters of the same bucket elsewhere."""
        self.micro_batches += other.micro_batches
        self.samples += other.samples
        self.anchors += other.anchors
        self.real_tokens += other.real_tokens
        self.padded_tokens += other.padded_tokens


@dataclass(slots=True)
class WindowTotals:
    """A window on the host: plain values, so that ranks can send them to one another.

    Attributes:
        buckets: counters by bucket number.
        batches: plan indices of the micro-batches.
        sums: vectors by name, float64.
        max_length: longest sample in tokens.
    """

    buckets: dict[int, BucketCounts] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    sums: dict[str, Any] = field(default_factory=dict)
    max_length: int = 0

    @staticmethod
    def merged(parts: Sequence[WindowTotals]) -> WindowTotals:
        """The same window over several ranks, added up in rank order."""
        whole = WindowTotals()
        for part in parts:
            for number, counts in part.buckets.items():
                whole.buckets.setdefault(number, BucketCounts()).add(counts)
            for name, values in part.sums.items():
                array = np.asarray(values, np.float64)
                whole.sums[name] = whole.sums[name] + array if name in whole.sums else array
            whole.batches += part.batches
            whole.max_length = max(whole.max_length, part.max_length)
        return whole

    @property
    def loss(self) -> Ratio:
        """(Σ weighted loss, Σ weight) over all buckets."""
        pairs = [values for name, values in self.sums.items() if name.startswith("loss/")]
        return Ratio(float(sum(pair[0] for pair in pairs)), float(sum(pair[1] for pair in pairs)))


class WindowMetrics:
    """Adds up micro-batches. Everything that is counted adds; nothing is divided before the window is closed.

    Args:
        num_drafts: drafts of a block, J.
        device: where sums are kept.
    """

    def __init__(self, num_drafts: int, device: torch.device) -> None:
        self.num_drafts = num_drafts
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._totals = WindowTotals()
        self.rows: dict[int, np.ndarray] = {}

    def count(self, host: HostBatch) -> None:
        """A micro-batch that takes part in the window."""
        planned, totals = host.planned, self._totals
        counts = BucketCounts(1, len(host.lengths), len(host.anchors), int(host.lengths.sum()), planned.padded_tokens)
        totals.buckets.setdefault(planned.bucket, BucketCounts()).add(counts)
        totals.max_length = max(totals.max_length, int(host.lengths.max(initial=0)))
        totals.batches.append(planned.index)
        self.rows[planned.index] = planned.rows

    def add(self, name: str, values: Tensor) -> None:
        """Adds a vector to the sums of a name, on the device."""
        values = values.detach().to(torch.float64)
        self._sums[name] = self._sums[name] + values if name in self._sums else values

    def add_loss(self, bucket: int, index: int, loss: Tensor, weight: Tensor) -> None:
        """(Σ weighted loss, Σ weight) of a micro-batch or a part of it."""
        pair = torch.stack([loss.detach().double(), weight.detach().double()])
        self.add(f"loss/{bucket}", pair)
        self.add(f"batch/{index}", pair)

    def add_samples(self, index: int, losses: Tensor) -> None:
        """(Σ weighted loss, Σ weight) [B, 2] of some samples of a micro-batch, or of one that has no more."""
        name, values = f"rows/{index}", losses.detach().to(torch.float64).flatten()
        self._sums[name] = torch.cat([self._sums[name], values]) if name in self._sums else values

    def add_acceptance(self, correct: Tensor, live: Tensor) -> None:
        """Accuracy and acceptance of blocks: whether each draft is right and whether it counts, bool [A, J]."""
        hits = correct & live
        accepted = torch.cumprod(hits.long(), dim=1)
        reached = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], dim=1) * live
        for name, values in (("hits", hits), ("live", live), ("accepted", accepted), ("reached", reached)):
            self.add(name, values.sum(0))
        self.add("blocks", torch.full((1,), len(live), device=live.device))

    def fetch(self, *extra: Tensor) -> tuple[WindowTotals, list[float]]:
        """All sums by name, and `extra` scalars, in the window's only transfer to the host."""
        names = list(self._sums)
        parts = [self._sums[name].reshape(-1) for name in names]
        scalars = torch.stack([value.double() for value in extra]) if extra else torch.zeros(0, device=self._device)
        flat = torch.cat([*parts, scalars.double()]).cpu().numpy()
        pieces = np.split(flat, np.cumsum([len(part) for part in parts]))
        self._totals.sums = dict(zip(names, pieces[:-1], strict=True))
        return self._totals, pieces[-1].tolist()


def ratios_of(sums: dict[str, np.ndarray], num_drafts: int, first: int) -> dict[str, Ratio]:
    """Metrics of a window by catalogue name, from its sums.

    - ``accuracy/slot_k``: draft of slot k is the label, over supervised slots (marginal).
    - ``acceptance/slot_k``: slot k accepted given that all earlier ones were, over supervised slots that were reached.
    - ``acceptance/streak``: accepted drafts before the first mismatch or unsupervised slot, over blocks; τ = 1 + value.

    Args:
        sums: of `WindowTotals`.
        num_drafts: J.
        first: slot of the first draft.
    """
    nothing = np.zeros(num_drafts)
    hits, live = sums.get("hits", nothing), sums.get("live", nothing)
    accepted, reached = sums.get("accepted", nothing), sums.get("reached", nothing)
    blocks = float(sums.get("blocks", np.zeros(1))[0])
    ratios = {
        "acceptance/streak": Ratio(float(accepted.sum()), blocks),
        "accuracy/all": Ratio(float(hits.sum()), float(live.sum())),
    }
    for draft in range(num_drafts):
        slot = draft + first
        ratios[f"accuracy/slot_{slot}"] = Ratio(float(hits[draft]), float(live[draft]))
        ratios[f"acceptance/slot_{slot}"] = Ratio(float(accepted[draft]), float(reached[draft]))
    return ratios


def sample_losses(sums: dict[str, np.ndarray]) -> dict[int, np.ndarray]:
    """(Σ weighted loss, Σ weight) of the samples [B, 2] of each micro-batch, by plan index."""
    return {
        int(name.removeprefix("rows/")): values.reshape(-1, 2)
        for name, values in sums.items()
        if name.startswith("rows/")
    }


def bucket_totals(totals: WindowTotals) -> dict[int, BucketTotals]:
    """Each bucket's share of a window, by number in ascending order."""
    found = {}
    for number, counts in sorted(totals.buckets.items()):
        loss = totals.sums.get(f"loss/{number}", np.zeros(2))
        found[number] = BucketTotals(
            Ratio(float(loss[0]), float(loss[1])),
            counts.micro_batches,
            counts.samples,
            counts.anchors,
            counts.real_tokens,
            counts.padded_tokens,
        )
    return found
