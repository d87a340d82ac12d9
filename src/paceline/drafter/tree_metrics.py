"""What costs too much to measure in every step: top-k coverage, trees, and how far the drafter is calibrated.

Shape letters: A blocks, J drafts, D hidden, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.drafter.layers import accumulation_dtype, rows_at_once
from paceline.drafter.metrics import WindowMetrics
from paceline.drafter.tree import tree_streaks
from paceline.types import Ratio

COVERAGE = (2, 4, 8, 16)
BUDGETS = (16, 64, 256)
CALIBRATED_BUDGET = 64
TEMPERATURES = (0.5, 0.63, 0.79, 1.0, 1.26, 1.59, 2.0, 2.52, 3.17)


def evenly_spaced(count: int, share: float) -> np.ndarray:
    """Evenly spread choice of about `share` of `count` blocks, at least one if there are any."""
    wanted = min(count, max(1, round(count * share)))
    return (np.arange(wanted) * count) // max(1, wanted)


@torch.no_grad()
def diagnose(hidden: Tensor, head: Tensor, labels: Tensor, live: Tensor, chunk: int, tally: WindowMetrics) -> None:
    """Adds coverage, tree streaks and their surrogates of some blocks to a tally.

    Args:
        hidden: of the drafting slots, [A, J, D].
        head: frozen, [V, D].
        labels, live: of the drafts, [A, J].
        chunk: slots whose logits exist at once, at most (at least one block).
        tally: where sums go.
    """
    blocks = max(1, rows_at_once(chunk, head.shape[0]) // hidden.shape[1])
    for begin in range(0, hidden.shape[0], blocks):
        part = slice(begin, begin + blocks)
        logits = (hidden[part].flatten(0, 1) @ head.T).to(accumulation_dtype(hidden.dtype)).view(*live[part].shape, -1)
        _add(logits, labels[part], live[part], tally)


def _add(logits: Tensor, labels: Tensor, live: Tensor, tally: WindowMetrics) -> None:
    own = logits.gather(2, labels[..., None])
    lower = torch.arange(logits.shape[2], device=logits.device) < labels[..., None]
    rank = ((logits > own) | ((logits == own) & lower)).sum(2)  # of equal ones, as a tree takes them: by token
    for k in COVERAGE:
        tally.add(f"coverage/{k}", ((rank < k) & live).sum(0))
    tally.add("coverage/live", live.sum(0))
    top = logits.topk(min(max(BUDGETS), logits.shape[2]), dim=2).values
    calibration = []
    for temperature in TEMPERATURES:
        total = torch.logsumexp(logits / temperature, dim=2, keepdim=True)
        budgets = BUDGETS if temperature == 1.0 else (CALIBRATED_BUDGET,)
        found = tree_streaks(top / temperature - total, rank, live, budgets)
        # A block that ends early cannot be accepted further: its expectation is not comparable, so only whole blocks.
        whole = live.all(1)
        index = budgets.index(CALIBRATED_BUDGET)
        calibration.append(torch.stack([(found.streaks[index] * whole).sum(), (found.surrogates[index] * whole).sum()]))
        if temperature == 1.0:
            for budget, streaks, surrogates in zip(budgets, found.streaks, found.surrogates, strict=True):
                blocks = torch.full((), float(len(streaks)), dtype=streaks.dtype, device=streaks.device)
                ends = (streaks * whole).sum(), (surrogates * whole).sum()
                tally.add(f"tree/{budget}", torch.stack([streaks.sum(), surrogates.sum(), blocks, *ends]))
    tally.add("calibration", torch.stack(calibration).flatten())


def diagnosis_ratios(sums: dict[str, np.ndarray], first: int) -> dict[str, Ratio]:
    """Diagnosed metrics by catalogue name; empty where nothing was diagnosed.

    - ``coverage/top_k_slot_j``: label among the k likeliest tokens, over supervised slots.
    - ``tree/streak_N``, ``tree/surrogate_N``: realised and expected depth, over blocks.
    - ``tree/surrogate_ratio_N``: realised / expected depth, below 1 for a drafter that is too sure of itself; over
      blocks that are supervised to their end, for one that ends early cannot be accepted further.
    - ``tree/temperature``: of the logits, at which both agree over blocks that are supervised to their end.
    """
    if "coverage/live" not in sums:
        return {}
    ratios = {}
    for draft, live in enumerate(sums["coverage/live"]):
        for k in COVERAGE:
            ratios[f"coverage/top_{k}_slot_{draft + first}"] = Ratio(float(sums[f"coverage/{k}"][draft]), float(live))
    for budget in BUDGETS:
        streaks, surrogates, blocks, realised, expected = (float(value) for value in sums[f"tree/{budget}"])
        ratios[f"tree/streak_{budget}"] = Ratio(streaks, blocks)
        ratios[f"tree/surrogate_{budget}"] = Ratio(surrogates, blocks)
        ratios[f"tree/surrogate_ratio_{budget}"] = Ratio(realised, expected)
    temperature = calibrated_temperature(sums["calibration"].reshape(-1, 2))
    if temperature is not None:
        ratios["tree/temperature"] = Ratio(temperature, 1.0)
    return ratios


def calibrated_temperature(sums: np.ndarray) -> float | None:
    """Temperature at which Σ realised streaks = Σ surrogates, by straight lines in log temperature.

    Args:
        sums: (Σ streaks, Σ surrogates) by temperature, [T, 2].

    Returns:
        The ends of the range where the two do not meet inside it; None where no block was whole.
    """
    if not sums.any():
        return None
    # Hotter is less sure of itself: the surrogate falls, the streak hardly moves.
    excess = sums[:, 1] - sums[:, 0]
    logs = np.log(np.array(TEMPERATURES))
    for i in range(len(excess) - 1):
        if excess[i] >= 0 > excess[i + 1]:
            share = excess[i] / (excess[i] - excess[i + 1])
            return float(np.exp(logs[i] + share * (logs[i + 1] - logs[i])))
    return TEMPERATURES[-1] if excess[0] >= 0 else TEMPERATURES[0]
