"""What a micro-batch may hold: padded tokens (or cost), samples, draft positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.config.schema import PlanConfig


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """Budgets of one micro-batch.

    Attributes:
        token_budget: samples × cost of the padded width at most.
        max_samples: samples at most.
        draft_position_budget: draft positions at most; None: no limit.
        width_multiple: padded widths are multiples of it.
        attention_length: width w costs w + ⌈w² / attention_length⌉; None: w.
    """

    token_budget: int
    max_samples: int
    draft_position_budget: int | None
    width_multiple: int
    attention_length: int | None

    @classmethod
    def of(cls, settings: PlanConfig) -> BatchBudget:
        """The limits that the settings name."""
        return cls(
            settings.token_budget,
            settings.max_samples,
            settings.draft_position_budget,
            settings.width_multiple,
            settings.attention_length,
        )

    @property
    def draft_limit(self) -> int:
        """The draft position budget, or a number that no batch reaches."""
        return self.draft_position_budget if self.draft_position_budget is not None else 2**62

    def width(self, length: int) -> int:
        """Padded width of a longest sample of ``length`` tokens."""
        return -(-length // self.width_multiple) * self.width_multiple

    def widths(self, lengths: np.ndarray) -> np.ndarray:
        """Padded width for each length, int64, same shape."""
        q = self.width_multiple
        return -(-lengths.astype(np.int64) // q) * q

    def cost(self, width: int) -> int:
        """Budget that one sample of this padded width uses."""
        return width if self.attention_length is None else width - (-width * width // self.attention_length)

    def capacity(self, width: int) -> int:
        """Samples of this padded width that a micro-batch holds (draft positions aside); 0 when not even one."""
        return min(self.max_samples, self.token_budget // self.cost(width))
