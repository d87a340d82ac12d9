"""The tap guard: what reaches the drafter is provably the target's hidden states, or the run stops and names the tap.

A worker runs `guard_first_batch` once and `check_features` on a sample of later batches. Each catches an error that
trains without an error: states that are zero, constant or not finite; rows that see one another, the padding, or tokens
after them; state left over from an earlier call; taps of the wrong layer.

Everything is computed where the features are, some tokens at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.errors import TargetError
from paceline.target_model.model import TargetModel
from paceline.target_model.row_check import judged, leaks, relative_errors, tolerance
from paceline.types import FeatureBatch

LONGEST_PROBE = 512
"""Rows are cut to this many tokens before they are run again."""
CHECKED_AT_ONCE = 4096
"""Tokens whose states are looked at in float32 at once."""


@dataclass(frozen=True, slots=True)
class TapStatistics:
    """What one tap put out over a batch.

    Attributes:
        layer: tapped layer id.
        rms: root mean square of all numbers.
        variance: mean over the width of the variance over tokens.
        batch_error: largest relative difference of a token's states between batch and alone.
        shift_change: relative change when the neighbouring layer is tapped instead.
    """

    layer: int
    rms: float
    variance: float
    batch_error: float = 0.0
    shift_change: float = float("inf")


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
        low, high, bad, rms, variance = _moments(features[:, place * hidden_size : (place + 1) * hidden_size])
        shown = f"tap guard: {where}: layer {layer}: min {low:.4g}, max {high:.4g}"
        if bad:
            raise TargetError(f"{shown}: {bad} of {shape[0]} tokens are not finite; use a wider target.dtype")
        if low == high == 0.0:
            raise TargetError(f"{shown}: all states are zero; the target does not run as it should")
        if shape[0] > 1 and variance == 0.0:
            raise TargetError(f"{shown}: every token has the same states; the target does not run as it should")
        found.append(TapStatistics(layer, rms, variance))
    return found


def _moments(states: Tensor) -> tuple[float, float, int, float, float]:
    """Least, largest, tokens that are not finite, root mean square, variance over tokens (mean over the width)."""
    lows, highs = [], []
    bad = torch.zeros((), dtype=torch.int64, device=states.device)
    first = states[0].float()
    squares, sums, sums_of_squares = (
        torch.zeros(states.shape[1], dtype=torch.float64, device=states.device) for _ in range(3)
    )
    for part in states.split(CHECKED_AT_ONCE):
        values = part.float()
        lows.append(values.min())
        highs.append(values.max())
        bad += (~torch.isfinite(values)).any(dim=1).sum()
        squares += values.square().sum(dim=0)
        # Around the first token, so that equal tokens give exactly 0.
        values = values - first
        sums += values.sum(dim=0)
        sums_of_squares += values.square().sum(dim=0)
    count = len(states)
    variance = (sums_of_squares / count - (sums / count).square()).clamp_min(0.0).mean()
    rms = (squares.mean() / count).sqrt()
    return float(torch.stack(lows).min()), float(torch.stack(highs).max()), int(bad), float(rms), float(variance)


@torch.no_grad()
def guard_first_batch(target: TargetModel, batch: FeatureBatch, *, spare: Tensor | None = None) -> list[TapStatistics]:
    """Checks a worker's first batch, running pieces of it again.

    Beyond `check_features`: its shortest and longest rows alone, and the first half of the longest alone, give the
    states that they had in the batch; tapping each neighbouring layer instead gives others. Of documents that share a
    row, some are changed, and the others must not follow.

    Args:
        target: the loaded target.
        batch: the features that it made.
        spare: memory for as many features, used where documents share a row; new memory where None.

    Returns:
        Statistics per tap, in feature order.

    Raises:
        TargetError: names the tap, the row and the size of the difference.
    """
    found = check_features(batch, target.taps, target.facts.hidden_size)
    lengths = np.asarray(batch.host.lengths)
    ids = torch.as_tensor(np.asarray(batch.host.ids), device=target.device)
    longest, shortest = int(lengths.argmax()), int(lengths.argmin())
    first = min(int(lengths[longest]), LONGEST_PROBE)
    probes = {(longest, first), (longest, max(1, first // 2)), (shortest, min(int(lengths[shortest]), LONGEST_PROBE))}
    errors = torch.stack([_error_alone(target, batch, ids, *probe) for probe in sorted(probes)]).amax(dim=0)
    if target.packed and len(lengths) > 1:
        _check_documents_apart(target, batch, ids, spare)
    changes = _shift_changes(target, ids[longest : longest + 1, :first])
    for layer, change in zip(target.taps, changes, strict=True):
        if not change > tolerance(target.dtype) * 1e-2:
            raise TargetError(
                f"tap guard: layer {layer}: the neighbouring layer has the same states (relative change {change:.2g}); "
                "its hook does not sit on the layer that it names"
            )
    return [
        TapStatistics(entry.layer, entry.rms, entry.variance, float(error), change)
        for entry, error, change in zip(found, errors, changes, strict=True)
    ]


def _error_alone(target: TargetModel, batch: FeatureBatch, ids: Tensor, row: int, length: int) -> Tensor:
    """Largest relative error per tap between a row's first tokens alone and in the batch; refused where too large."""
    start = int(np.sum(batch.host.lengths[:row]))
    alone, _ = target.tap_rows(ids[row : row + 1, :length], [length])
    errors = relative_errors(alone, batch.features[start : start + length], len(target.taps))
    for layer, error in zip(target.taps, judged(errors, target.dtype).tolist(), strict=True):
        if not error <= tolerance(target.dtype):
            raise TargetError(
                f"tap guard: batch {batch.host.planned.index}: layer {layer}: the first {length} tokens of sample "
                f"{int(np.asarray(batch.host.planned.rows)[row])} alone differ from those in the batch by {error:.3g} "
                f"(relative, {tolerance(target.dtype):g} allowed); padding, neighbours or later tokens leak into its "
                "states"
            )
    return errors.amax(dim=0)


def _check_documents_apart(target: TargetModel, batch: FeatureBatch, ids: Tensor, spare: Tensor | None) -> None:
    found = leaks(target, ids, batch.host.lengths, batch.features.to(target.device), out=spare)
    for layer, leak in zip(target.taps, found, strict=True):
        if leak != 0.0:
            raise TargetError(
                f"tap guard: batch {batch.host.planned.index}: layer {layer}: documents that share a row follow a "
                f"change of those before them by {leak:.2g} (relative); set target.rows to padded "
                "and plan.strategy to grid"
            )


def _shift_changes(target: TargetModel, ids: Tensor) -> list[float]:
    """Relative change of each tap's states when every tap moves to a neighbouring layer."""
    deepest = target.facts.num_layers - 1
    if deepest == 0:
        return [float("inf")] * len(target.taps)
    shifted = [tap + 1 if tap < deepest else tap - 1 for tap in target.taps]
    neighbour = target.with_layout(masked=True, packed=False, taps=shifted)
    ours, _ = target.tap_rows(ids, [ids.shape[1]])
    theirs, _ = neighbour.tap_rows(ids, [ids.shape[1]])
    pairs = zip(ours.chunk(len(shifted), 1), theirs.chunk(len(shifted), 1), strict=True)
    return [float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30)) for a, b in pairs]
