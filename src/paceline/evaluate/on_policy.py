"""How far answers are the target's own: its greedy choices in them, and how surprised it is by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import DataError
from paceline.types import SampleSource

Score = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Ids [length] and label positions [n] → whether each label is the target's most probable token, bool [n], and its
negative log-likelihood in nats, float [n]; both given the true tokens before it."""
_LABELS = 1024
"""Labels of a row that are scored at most; bounds the logits that exist at once."""


@dataclass(frozen=True, slots=True)
class OnPolicyReport:
    """What scoring some rows with the target found.

    Attributes:
        rows, tokens: scored.
        greedy_share: share of the scored answer tokens that are the target's most probable token.
        mean_nll: mean negative log-likelihood of an answer token, in nats.
        tau_ceiling: acceptance length at greedy verification of a drafter that drafts exactly these answers: 1 + the
            mean number of greedy choices in a row behind an anchor, at most block_size - 1.
        sentence: the same for people.
    """

    rows: int
    tokens: int
    greedy_share: float
    mean_nll: float
    tau_ceiling: float
    sentence: str


def on_policy(
    store: SampleSource, rows: Sequence[int], score: Score, *, block_size: int, progress: Callable[[int], None]
) -> OnPolicyReport:
    """Score the answers of some rows.

    Args:
        store: prepared data.
        rows: sample ids to score.
        score: the target (see `Score`).
        block_size: slots of a block.
        progress: called with 1 for every row.

    Raises:
        DataError: no rows.
    """
    greedy: list[np.ndarray] = []
    surprise: list[np.ndarray] = []
    streaks: list[np.ndarray] = []
    for ids, mask in store.read(rows):
        labels = np.flatnonzero(mask[1:])[:_LABELS] + 1
        if len(labels):
            chosen, nll = score(ids, labels)
            greedy.append(chosen)
            surprise.append(nll)
            streaks.append(streaks_of(labels, chosen, mask, block_size))
        progress(1)
    if not greedy:
        raise DataError("on-policy test: no rows to score; give at least one")
    share = float(np.concatenate(greedy).mean())
    ahead = np.concatenate(streaks)
    ceiling = 1.0 + (float(ahead.mean()) if len(ahead) else 0.0)
    mean_nll = float(np.concatenate(surprise).mean())
    return OnPolicyReport(
        len(rows), sum(map(len, greedy)), share, mean_nll, ceiling, _sentence(share, ceiling, block_size)
    )


def streaks_of(labels: np.ndarray, chosen: np.ndarray, mask: np.ndarray, block_size: int) -> np.ndarray:
    """Greedy choices in a row behind each eligible anchor whose block was scored whole, int [anchors].

    Args:
        labels: scored positions, ascending, [n].
        chosen: whether the label there is the target's choice, bool [n].
        mask: loss mask, bool [length].
        block_size: slots of a block; a streak has at most one less.
    """
    length = len(mask)
    good = np.zeros(length + block_size, dtype=bool)
    good[labels] = chosen
    last = int(labels[-1])
    whole = last == int(np.flatnonzero(mask)[-1])
    anchors = np.flatnonzero(mask[:-1] & mask[1:])
    anchors = anchors if whole else anchors[anchors + block_size - 1 <= last]
    supervised = np.concatenate([mask, np.zeros(block_size, dtype=bool)])
    alive = np.ones(len(anchors), dtype=bool)
    streak = np.zeros(len(anchors), dtype=np.int64)
    for step in range(1, block_size):
        alive &= good[anchors + step] & supervised[anchors + step]
        streak += alive
    return streak


def _sentence(share: float, ceiling: float, block_size: int) -> str:
    if share > 0.95:
        advice = "these answers are as good as the target's own greedy ones"
    elif share > 0.8:
        advice = "these answers look sampled from the target or from a near relative"
    else:
        advice = "these answers were written by another model: let the target answer anew (`paceline regenerate`)"
    return (
        f"{share:.1%} of the answer tokens are the target's greedy choice; a drafter that drafts exactly them would "
        f"reach τ {ceiling:.2f} of at most {block_size}; {advice}"
    )
