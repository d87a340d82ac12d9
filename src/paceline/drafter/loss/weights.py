"""Slot weights by objective name, one strategy a file.

Each takes the cross entropies (detached) and the live mask of all drafts, [A, J], and the decay length γ and smoothing
α of this step, and returns non-negative weights [A, J], zero where a draft is not live.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.drafter.loss.decay import decay_weights
from paceline.drafter.loss.dpace import dpace_weights

SlotWeights = Callable[[Tensor, Tensor, float, float], Tensor]

SLOT_WEIGHTS: dict[str, SlotWeights] = {"decay": decay_weights, "dpace": dpace_weights}
