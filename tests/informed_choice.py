"""A choice that drafts like an oracle now and then, so that random drafters have accepted drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.decode.sampling import Greedy


class Informed(Greedy):
    """Greedy, but its first few drafts of a block are the target's own next tokens.

    Args:
        answer: the target's greedy answer, longer than what is decoded with this choice.
        seed: of how many drafts of a block are right.
    """

    def __init__(self, answer: Sequence[int], seed: int = 0) -> None:
        self.answer, self.at, self.source = list(answer), 0, random.Random(seed)
        self.right: list[int] = []
        self.logits: list[Tensor] = []

    def token(self, logits: Tensor) -> int:
        """The prompt's next token."""
        self.at = 1
        return super().token(logits)

    def drafts(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Right for a random number of drafts, wrong at the next, the drafter's own after that."""
        self.logits.append(logits)
        drafts, _ = super().drafts(logits)
        right = self.source.randrange(drafts.shape[0] + 1) if drafts.shape[0] else 0
        drafts[:right] = torch.tensor(self.answer[self.at : self.at + right])
        if right < drafts.shape[0]:
            drafts[right] = (self.answer[self.at + right] + 1) % 97
        self.right.append(right)
        return drafts, None

    def judge(self, drafts: Tensor, chances: Tensor | None, logits: Tensor) -> tuple[int, int]:
        """As greedy; remembers how far the answer has come."""
        accepted, after = super().judge(drafts, chances, logits)
        self.at += accepted + 1
        return accepted, after
