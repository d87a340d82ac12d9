"""Sums of a window, kept on the device and fetched once: loss, weights, accuracy, acceptance.

Shape letters: A anchors, J drafts of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.types import BucketTotals, HostBatch, Ratio


@dataclass(slots=True)
class _Bucket:
    """Host counters of one bucket."""

    micro_batches: int = 0
    samples: int = 0
    anchors: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0


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
        self._buckets: dict[int, _Bucket] = {}
        self.batches: list[int] = []
        self.rows: dict[int, np.ndarray] = {}
        self.max_length = 0

    def count(self, host: HostBatch) -> None:
        """A micro-batch that takes part in the window."""
        planned = host.planned
        bucket = self._buckets.setdefault(planned.bucket, _Bucket())
        bucket.micro_batches += 1
        bucket.samples += len(host.lengths)
        bucket.anchors += len(host.anchors)
        bucket.real_tokens += int(host.lengths.sum())
        bucket.padded_tokens += planned.padded_tokens
        self.max_length = max(self.max_length, int(host.lengths.max(initial=0)))
        self.batches.append(planned.index)
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

    def fetch(self, extra: Tensor) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """All sums by name, and `extra` (a vector), in the window's only transfer to the host."""
        names = list(self._sums)
        parts = [self._sums[name].reshape(-1) for name in names]
        flat = torch.cat([*parts, extra.reshape(-1).double()]).cpu().numpy()
        edges = np.cumsum([len(part) for part in parts])
        pieces = np.split(flat, edges)
        return dict(zip(names, pieces[:-1], strict=True)), pieces[-1]

    def bucket_counts(self) -> dict[int, tuple[int, int, int, int, int]]:
        """Micro-batches, samples, anchors, real and padded tokens by bucket."""
        return {
            number: (b.micro_batches, b.samples, b.anchors, b.real_tokens, b.padded_tokens)
            for number, b in self._buckets.items()
        }


def ratios_of(sums: dict[str, np.ndarray], num_drafts: int, first: int) -> dict[str, Ratio]:
    """Metrics of a window by catalogue name, from its sums.

    - ``accuracy/slot_k``: draft of slot k is the label, over supervised slots (marginal).
    - ``acceptance/slot_k``: slot k accepted given that all earlier ones were, over supervised slots that were reached.
    - ``acceptance/streak``: accepted drafts before the first mismatch or unsupervised slot, over blocks; τ = 1 + value.

    Args:
        sums: of `WindowTally.fetch`.
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


def bucket_totals(
    counts: dict[int, tuple[int, int, int, int, int]], sums: dict[str, np.ndarray]
) -> dict[int, BucketTotals]:
    """Each bucket's share of a window, by number in ascending order."""
    totals = {}
    for number in sorted(counts):
        loss = sums.get(f"loss/{number}", np.zeros(2))
        totals[number] = BucketTotals(Ratio(float(loss[0]), float(loss[1])), *counts[number])
    return totals
