"""How drafts are chosen and judged: greedily, or sampled with the target's exact distribution.

Shape letters: M drafts, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class TokenChooser(Protocol):
    """Chooses tokens of the target and of the drafter, and says how many drafts stand."""

    def token(self, logits: Tensor) -> int:
        """A token of the target from its logits [V]."""
        ...

    def drafts(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Drafts int64 [M] from the drafter's logits [M, V], and what judging them needs."""
        ...

    def judge(self, drafts: Tensor, chances: Tensor | None, logits: Tensor) -> tuple[int, int]:
        """How many leading drafts [M] stand, and the token after them, from the target's logits [M + 1, V]."""
        ...


class Greedy:
    """The most probable token everywhere; a draft is kept while it is the target's own choice."""

    def token(self, logits: Tensor) -> int:
        """The first of the largest logits [V]."""
        return int(logits.argmax())

    def drafts(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The largest logit of every row."""
        return logits.argmax(dim=-1), None

    def judge(self, drafts: Tensor, chances: Tensor | None, logits: Tensor) -> tuple[int, int]:
        """Leading drafts that equal the target's choices, and its choice after them."""
        best, proposed = logits.argmax(dim=-1).tolist(), drafts.tolist()
        accepted = next((at for at, token in enumerate(proposed) if token != best[at]), len(proposed))
        return accepted, best[accepted]


class Sampled:
    """Sampling at a temperature. Output tokens have the target's distribution, whatever the drafter proposes.

    A draft x is kept with probability min(1, p(x) / q(x)); the first that falls is replaced by a draw from
    max(0, p - q), normalised [Leviathan et al. 2023, arXiv 2211.17192, theorem 1].

    Args:
        temperature: of both distributions, above 0.
        seed: of all draws of one sequence.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(seed)

    def token(self, logits: Tensor) -> int:
        """A draw from the target's distribution."""
        return self._draw(self._chances(logits))

    def drafts(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """A draw per row and the rows' distributions [M, V]."""
        chances = self._chances(logits)
        if logits.shape[0] == 0:
            return torch.zeros(0, dtype=torch.int64, device=logits.device), chances
        drawn = torch.multinomial(chances, 1, generator=self.generator)[:, 0]
        return drawn.to(logits.device), chances

    def judge(self, drafts: Tensor, chances: Tensor | None, logits: Tensor) -> tuple[int, int]:
        """Rejection sampling, draft by draft."""
        assert chances is not None
        wanted = self._chances(logits)
        luck = torch.rand(drafts.shape[0], generator=self.generator, dtype=torch.float64)
        for place, draft in enumerate(drafts.tolist()):
            if luck[place] * chances[place, draft] >= wanted[place, draft]:
                rest = (wanted[place] - chances[place]).clamp_min(0)
                return place, self._draw(rest if float(rest.sum()) > 0 else wanted[place])
        return drafts.shape[0], self._draw(wanted[-1])

    def _chances(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.double().cpu() / self.temperature, dim=-1)

    def _draw(self, chances: Tensor) -> int:
        return int(torch.multinomial(chances, 1, generator=self.generator))
