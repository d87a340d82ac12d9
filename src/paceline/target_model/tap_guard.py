"""The tap guard: what reaches the drafter is provably the target's hidden states, or the run stops and names the tap.

A worker runs `guard_first_batch` once and `check_features` on a sample of later batches. Each catches an error that
trains without an error: states that are zero, constant or not finite; rows that see one another, the padding, or tokens
after them; state left over from an earlier call; taps of the wrong layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.errors import TargetError
from paceline.target_model.model import TargetModel
from paceline.target_model.packing_check import leaks
from paceline.types import FeatureBatch

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Allowed relative error of a token's states between two batchings. In 16 bits it is the median over tokens that must
keep it: a router may send single tokens elsewhere after a rounding error."""
LONGEST_PROBE = 512
"""Rows are cut to this many tokens before they are run again."""


@dataclass(frozen=True, slots=True)
class TapStatistics:
    """What one tap put out over a batch.

    Attributes:
        layer: tapped layer id.
        rms: root mean square of all numbers.
        variance: mean over the width of the variance over tokens.
        largest: largest magnitude.
        batch_error: largest relative difference of a token's states between batch and alone; None when not run.
        shift_change: relative change when the neighbouring layer is tapped instead; None when not run.
    """

    layer: int
    rms: float
    variance: float
    largest: float
    batch_error: float | None = None
    shift_change: float | None = None


def check_features(batch: FeatureBatch, taps: Sequence[int], hidden_size: int) -> list[TapStatistics]:
    """Checks one batch of features without running the target again.

    Args:
        batch: what the target handed over.
        taps: layer ids, in feature order.
        hidden_size: width of one tap.

    Raises:
        TargetError: shape, non-finite, all zero or constant over tokens; names the tap and its range.
    """
    features, where = batch.features, f"batch {batch.host.planned.index}"
    shape = (int(np.sum(batch.host.lengths)), len(taps) * hidden_size)
    if tuple(features.shape) != shape:
        raise TargetError(f"tap guard: {where}: features are {list(features.shape)} instead of {list(shape)}")
    found = []
    for place, layer in enumerate(taps):
        states = features[:, place * hidden_size : (place + 1) * hidden_size].float()
        low, high = float(states.min()), float(states.max())
        shown = f"tap guard: {where}: layer {layer}: min {low:.4g}, max {high:.4g}"
        if not bool(torch.isfinite(states).all()):
            bad = int((~torch.isfinite(states)).any(dim=1).sum())
            raise TargetError(f"{shown}: {bad} of {shape[0]} tokens are not finite; use a wider target.dtype")
        if low == high == 0.0:
            raise TargetError(f"{shown}: all states are zero; the target does not run as it should")
        variance = float(states.var(dim=0, unbiased=False).mean())
        if shape[0] > 1 and variance == 0.0:
            raise TargetError(f"{shown}: every token has the same states; the target does not run as it should")
        rms = float(states.square().mean().sqrt())
        found.append(TapStatistics(layer, rms, variance, max(abs(low), abs(high))))
    return found


@torch.no_grad()
def guard_first_batch(target: TargetModel, batch: FeatureBatch) -> list[TapStatistics]:
    """Checks a worker's first batch, running pieces of it again.

    Beyond `check_features`: its shortest and longest rows alone, and the first half of the longest alone, give the
    states that they had in the batch; tapping each neighbouring layer instead gives others. Of documents that share a
    row, some are changed, and the others must not follow.

    Args:
        target: the loaded target.
        batch: the features that it made.

    Returns:
        Statistics per tap, in feature order.

    Raises:
        TargetError: names the tap, the row and the size of the difference.
    """
    found = check_features(batch, target.taps, target.facts.hidden_size)
    lengths = np.asarray(batch.host.lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    ids = torch.as_tensor(np.asarray(batch.host.ids), device=target.device)
    longest, shortest = int(lengths.argmax()), int(lengths.argmin())
    probes = [(row, min(int(lengths[row]), LONGEST_PROBE)) for row in sorted({longest, shortest})]
    probes.append((longest, max(1, probes[-1][1] // 2 if probes[-1][0] == longest else int(lengths[longest]) // 2)))
    errors = np.zeros(len(target.taps))
    for row, length in probes:
        length = min(length, LONGEST_PROBE)
        alone, _ = target.tap_rows(ids[row : row + 1, :length], [length])
        within = batch.features[int(starts[row]) : int(starts[row]) + length]
        errors = np.maximum(errors, _compare(target, alone, within.to(alone.device), batch, row, length))
    for layer, leak in zip(target.taps, _leaks(target, ids, lengths), strict=True):
        if leak != 0.0:
            raise TargetError(
                f"tap guard: batch {batch.host.planned.index}: layer {layer}: documents that share a row follow a "
                f"change of those before them by {leak:.2g} (relative); set target.rows to padded "
                "and plan.strategy to grid"
            )
    changes = _shift_changes(target, ids[longest : longest + 1, : min(int(lengths[longest]), LONGEST_PROBE)])
    for layer, change in zip(target.taps, changes, strict=True):
        if not change > TOLERANCE.get(target.dtype, 1e-2) * 1e-2:
            raise TargetError(
                f"tap guard: layer {layer}: the neighbouring layer has the same states (relative change {change:.2g}); "
                "its hook does not sit on the layer that it names"
            )
    return [
        TapStatistics(entry.layer, entry.rms, entry.variance, entry.largest, float(error), change)
        for entry, error, change in zip(found, errors, changes, strict=True)
    ]


def _compare(
    target: TargetModel, alone: Tensor, within: Tensor, batch: FeatureBatch, row: int, length: int
) -> np.ndarray:
    """Relative error per tap between a row run alone and in its batch; refused above the tolerance."""
    allowed = TOLERANCE.get(target.dtype, 1e-2)
    errors = []
    for layer, one, other in zip(
        target.taps, alone.chunk(len(target.taps), 1), within.chunk(len(target.taps), 1), strict=True
    ):
        one, other = one.double(), other.double()
        relative = (one - other).norm(dim=1) / one.norm(dim=1).clamp_min(1e-30)
        judged = relative.median() if target.dtype in (torch.float16, torch.bfloat16) else relative.max()
        if not float(judged) <= allowed:
            sample = int(np.asarray(batch.host.planned.rows)[row])
            raise TargetError(
                f"tap guard: batch {batch.host.planned.index}: layer {layer}: the first {length} tokens of sample "
                f"{sample} alone differ from those in the batch by {float(judged):.3g} "
                f"(relative, {allowed:g} allowed); padding, neighbours or later tokens leak into its states"
            )
        errors.append(float(relative.max()))
    return np.asarray(errors)


def _leaks(target: TargetModel, ids: Tensor, lengths: np.ndarray) -> list[float]:
    return leaks(target, ids, lengths) if target.packed and len(lengths) > 1 else [0.0] * len(target.taps)


def _shift_changes(target: TargetModel, ids: Tensor) -> list[float]:
    """Relative change of each tap's states when every tap moves to a neighbouring layer."""
    deepest = target.facts.num_layers - 1
    shifted = [tap + 1 if tap < deepest else tap - 1 for tap in target.taps]
    if target.facts.num_layers == 1:
        return [float("inf")] * len(target.taps)
    neighbour = TargetModel(target.model, target.structure, target.facts, shifted)
    ours, _ = target.tap_rows(ids, [ids.shape[1]])
    theirs, _ = neighbour.tap_rows(ids, [ids.shape[1]])
    pairs = zip(ours.chunk(len(shifted), 1), theirs.chunk(len(shifted), 1), strict=True)
    return [float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30)) for a, b in pairs]
