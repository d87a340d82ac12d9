"""Jittered: sorted by a perturbed length, length × (1 + N(0, jitter)), then cut at the true running maximum."""

from __future__ import annotations

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.batches import Batches, cut_and_compose
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import Entries
from paceline.plan.rng import CHUNK, ascending

HALVES = 8
"""Uniform 16-bit integers summed for one deviate: close to normal, and the same integer on every platform."""
DEVIATION = 53_510
"""Standard deviation of that sum, 2^16 · √(8/12)."""
MILLION = 1_000_000


def compose(entries: Entries, limits: BatchBudget, settings: PlanConfig, bits: np.random.BitGenerator) -> Batches:
    """Micro-batches of one epoch; see the registry for the signature."""
    return cut_and_compose(ascending(perturbed(entries.lengths, settings.jitter, bits)), entries, limits)


def perturbed(lengths: np.ndarray, jitter: float, bits: np.random.BitGenerator) -> np.ndarray:
    """Lengths × (1 + jitter · deviate) in units of about 1/50 token, int64, at least 0."""
    share = round(jitter * MILLION)
    made = np.empty(len(lengths), np.int64)
    for start in range(0, len(lengths), CHUNK):
        part = lengths[start : start + CHUNK].astype(np.int64)
        words = bits.random_raw(2 * len(part)).astype("<u8", copy=False).view("<u2").reshape(len(part), HALVES)
        deviates = words.sum(axis=1, dtype=np.int64) - HALVES * 0x7FFF - HALVES // 2
        factor = np.maximum(MILLION * DEVIATION + share * deviates, 0)
        made[start : start + len(part)] = part * (factor >> 10) >> 20
    return made
