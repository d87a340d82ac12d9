"""The most probable tokens of a block's slots with their log-probabilities, read from whole rows of logits.

A tree of N nodes needs the N most probable tokens of a slot at most, and of most slots far fewer. On a CPU the first
few are found at once and the others of a slot when they are asked for: the w largest logits are in the w chunks of the
largest maxima, so that after one pass over the rows only those chunks are searched. Elsewhere one transfer brings all.

Shape letters: M drafts, V vocabulary, C chunks.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

CHUNK = 64
"""Tokens that are represented by their largest logit."""
FIRST = 32
"""Tokens of a slot that are found before anybody asks."""
SAFE = 60.0
"""Logits up to this magnitude at the top of a row can be exponentiated in float32 without a shift."""


class Candidates:
    """Tables of tokens by falling probability, one a slot, filled by `widen`.

    Args:
        logits: [M, V], on any device.
        limit: most tokens of a slot that will ever be needed.
        temperature: by which logits are divided.

    Attributes:
        chances: log-probabilities per slot, falling; empty until widened.
        ids: their tokens.
    """

    def __init__(self, logits: Tensor, limit: int, temperature: float = 1.0) -> None:
        self._limit = min(limit, logits.shape[1])
        scaled = logits.detach().float()
        if temperature != 1.0:
            scaled = scaled / temperature
        self.chances: list[list[float]] = [[] for _ in logits]
        self.ids: list[list[int]] = [[] for _ in logits]
        if scaled.device.type != "cpu":
            top, ids = torch.topk(scaled, self._limit, dim=-1)
            self.chances = (top - torch.logsumexp(scaled, dim=-1, keepdim=True)).double().tolist()
            self.ids = ids.tolist()
            return
        self._rows = scaled.contiguous()
        self._array = self._rows.numpy()
        whole = scaled.shape[1] // CHUNK * CHUNK
        self._maxima = self._rows[:, :whole].unflatten(1, (-1, CHUNK)).amax(dim=-1).numpy()
        self._first = self._largest(slice(None), min(FIRST, self._limit))
        self._norms = [0.0] * len(self.ids)
        self._exponentials = torch.empty_like(self._rows[:1]).view(-1)

    def widen(self, slot: int) -> bool:
        """Finds a slot's first tokens, or else the others up to the limit; whether there were more."""
        found = self.ids[slot]
        if len(found) >= self._limit:
            return False
        if found:
            largest, tokens = self._largest(slice(slot, slot + 1), self._limit)
            # Equal logits may fall on either side of the first cut.
            new = np.flatnonzero(~np.isin(tokens[0], found))[: self._limit - len(found)]
            values, ids = largest[0][new], tokens[0][new]
        else:
            values, ids = self._first[0][slot], self._first[1][slot]
            self._norms[slot] = self._log_sum(slot, float(values[0]))
        self.chances[slot] += (values - self._norms[slot]).tolist()
        found += ids.tolist()
        return True

    def _log_sum(self, slot: int, peak: float) -> float:
        """log Σ exp of a row: row by row, so that the exponentials stay in the processor's cache."""
        row = self._rows[slot]
        if abs(peak) <= SAFE:
            return math.log(torch.exp(row, out=self._exponentials).sum())
        return peak + math.log(torch.sub(row, peak, out=self._exponentials).exp_().sum())

    def _largest(self, slots: slice, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The `width` largest logits of some slots, falling, float64, and their tokens."""
        rows, maxima = self._array[slots], self._maxima[slots]
        number, count = np.arange(rows.shape[0])[:, None], maxima.shape[1]
        if width < count:
            best = np.argpartition(maxima, count - width, axis=1)[:, -width:]
            chunks = rows[:, : count * CHUNK].reshape(len(rows), count, CHUNK)
            searched = np.concatenate([chunks[number, best].reshape(len(rows), -1), rows[:, count * CHUNK :]], axis=1)
            best = np.concatenate([best, np.full_like(number, count)], axis=1)  # what no whole chunk holds
        else:
            best, searched = np.broadcast_to(np.arange(count + 1), (len(rows), count + 1)), rows
        places = np.argpartition(searched, searched.shape[1] - width, axis=1)[:, -width:]
        values = searched[number, places]
        order = np.argsort(-values, axis=1, kind="stable")
        places = places[number, order]
        return values[number, order].astype(np.float64), best[number, places // CHUNK] * CHUNK + places % CHUNK
