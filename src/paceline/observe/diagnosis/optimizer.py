"""Checks of gradients and updates: spikes, skipped and clipped steps, weights that do not move."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from paceline.observe.diagnosis import MIN_LINES, Finding
from paceline.observe.run_history import History
from paceline.text import percent, short
from paceline.types import StepReport

MEMORY_STEPS = 200
"""Recent steps that say what gradient norm is usual."""
MIN_STEPS = 20
"""Fewer steps than this are not judged."""
STRETCH, NEIGHBORS = 10, 25
"""Norms that are judged together, and those before and behind that say what is usual for them."""
MAX_SAMPLES, MAX_SPIKES = 64, 100
"""Samples that one spike lists; spikes that are noted in one start of a run."""


def limit_of(norms: np.ndarray) -> tuple[float, float]:
    """The usual norm and the one above which a step is a spike.

    Eight deviations above the median: not one in 10^15 draws of a normal distribution, so heavy tails alone do not fill
    the list; and three medians, where the deviation is next to nothing.
    """
    middle = float(np.median(norms))
    spread = float(np.median(np.abs(norms - middle))) * 1.4826  # the deviation of a normal distribution
    return middle, max(middle + 8 * spread, 3 * middle)


def spikes_of(norms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of many norms are far above their neighbors; a norm that falls as a run learns has no single level.

    Args:
        norms: finite, in order, [n].

    Returns:
        Indices of the spikes, ascending, and the usual norm there.
    """
    found: list[np.ndarray] = []
    usual: list[np.ndarray] = []
    for start in range(0, norms.size, STRETCH):
        near = norms[max(start - NEIGHBORS, 0) : start + STRETCH + NEIGHBORS]
        middle, limit = limit_of(near)
        high = start + np.flatnonzero(norms[start : start + STRETCH] > limit)
        found.append(high)
        usual.append(np.full(high.size, middle))
    return np.concatenate(found), np.concatenate(usual)


class SpikeWatch:
    """Sees every step and describes those whose gradient is far above, while their samples are known.

    Args:
        total_steps: optimizer steps planned; gradients are large in the first twentieth of any run.
    """

    def __init__(self, total_steps: int) -> None:
        self._first = max(MIN_STEPS, total_steps // 20)
        self._norms: deque[float] = deque(maxlen=MEMORY_STEPS)
        self._left = MAX_SPIKES

    def see(self, report: StepReport) -> dict[str, Any] | None:
        """What is to be noted of a step: norms, place, rows and the rows with the highest loss; None for most steps."""
        norm = report.gradient_norm
        if report.skipped or not np.isfinite(norm):
            return None
        usual, limit = limit_of(np.array(self._norms)) if len(self._norms) >= MIN_STEPS else (norm, norm)
        self._norms.append(norm)
        if norm <= limit or report.step <= self._first or not self._left:
            return None
        self._left -= 1
        return {
            "norm": norm,
            "usual": usual,
            "epoch": report.epoch,
            "window": report.window,
            "batches": list(report.batches),
            "samples": [int(row) for rows in report.rows.values() for row in rows][:MAX_SAMPLES],
            "highest_loss": _highest(report),
        }


def _highest(report: StepReport, count: int = 3) -> dict[str, float]:
    """Row number and mean loss of the samples with the highest mean loss, highest first."""
    losses: dict[int, float] = {}
    for index, rows in report.rows.items():
        sums = report.sample_losses.get(index, np.zeros((0, 2)))
        # A batch without sample losses is left out.
        pairs = zip(rows, sums, strict=True) if len(sums) else ()
        losses |= {int(row): float(loss / weight) for row, (loss, weight) in pairs if weight > 0}
    highest = sorted(losses, key=lambda row: losses[row], reverse=True)[:count]
    return {str(row): round(losses[row], 4) for row in highest}


def gradient_spikes(run: History) -> list[Finding]:
    """Steps whose gradient norm is far above that of its neighbors, with the place in the plan."""
    norm = run.series("gradient/norm_max")
    good = np.flatnonzero(np.isfinite(norm))
    if good.size < MIN_LINES:
        return []
    spikes, usual = spikes_of(norm[good])
    spikes = good[spikes]
    late = run.steps[spikes] > max(20, run.total_steps // 20)
    spikes, usual = spikes[late], usual[late]
    if not spikes.size:
        return []
    worst = np.argsort(norm[spikes] / usual)[::-1][:5]
    places = "; ".join(
        f"{_place(run, int(spikes[i]))}: {short(float(norm[spikes[i]]))}, usual there {short(float(usual[i]))}"
        for i in worst
    )
    text = f"{spikes.size} gradient spike{'s' * (spikes.size > 1)}: {places}."
    return [Finding("gradient-spikes", "warning", text, "look at the samples of these batches")]


def _place(run: History, line: int) -> str:
    """Where a spike happened; with its samples, those of highest loss first, where it was noted while training."""
    step = int(run.steps[line])
    place: dict[str, Any] = {"epoch": int(run.epochs[line]), "window": int(run.windows[line])}
    place["batches"] = run.batches[line]
    for event in run.events:
        if event.event == "gradient-spike" and step - run.spans[line] < event.step <= step:
            step, place = event.step, event.fields
            break
    parts = [f"epoch {place['epoch']}, window {place['window']}, batches {_shown(place['batches'])}"]
    if place.get("highest_loss"):
        losses = (f"sample {row} with {loss:.2f}" for row, loss in place["highest_loss"].items())
        parts.append("highest loss: " + ", ".join(losses))
    if place.get("samples"):
        parts.append(f"samples {_shown(place['samples'])}")
    return f"step {step} ({'; '.join(parts)})"


def _shown(numbers: list[int], most: int = 12) -> str:
    """The first of the numbers, and how many more there are."""
    return ranges(numbers[:most]) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")


def ranges(numbers: list[int]) -> str:
    """``[3, 4, 5, 9]`` → ``3–5, 9``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}–{high}" if high > low else str(low) for low, high in parts)


def skipped_steps(run: History) -> list[Finding]:
    """Steps without an update, and losses that are not numbers."""
    skipped = float(np.sum(run.counts("gradient/skipped") * run.spans))
    if not skipped:
        return []
    count = f"{skipped:.0f} {'steps were' if skipped > 1.5 else 'step was'}"
    first = int(np.flatnonzero(run.counts("gradient/skipped") > 0)[0])
    where = ranges(list(range(run.steps[first] - run.spans[first] + 1, run.steps[first] + 1)))
    text = f"{count} skipped for a gradient that is not finite, first at step {where}."
    return [Finding("skipped-steps", "warning", text, "lower optimizer.lr or look at the samples of that step")]


def clipping(run: History) -> list[Finding]:
    """Clipping of nearly every step: not an error, because the optimizers' steps do not grow with the gradient."""
    share = run.pooled("gradient/clipped", slice(run.steps.size // 4, None))
    if run.steps.size < 4 or not share > 0.9:
        return []
    text = f"{percent(share)} of the gradients were clipped after the first quarter of the run."
    return [Finding("clipping", "info", text, "raise optimizer.clip_norm if it is to catch outliers only")]


def frozen_norms(run: History) -> list[Finding]:
    """Norm weights that never move: master weights or moments in a type that loses the updates."""
    share = run.series("norms/unmoved")[run.steps >= 200]
    share = share[np.isfinite(share)]
    if not share.size or share[-1] <= 0.01:
        return []
    text = f"{percent(float(share[-1]))} of the norm weights still have their first value after {run.steps[-1]} steps."
    return [Finding("frozen-norms", "warning", text, "check that master weights and moments are float32")]
