"""The most probable tokens of a block's slots with their log-probabilities, read from whole rows of logits.

A tree of N nodes needs the N most probable tokens of a slot at most, of most slots far fewer, and of the last slots
often none. On a CPU a slot is read when it is first asked for: the w largest logits are in the w chunks of the largest
maxima, so that after one pass over the row only those chunks are searched. Elsewhere one transfer brings all.

Equal logits come by ascending token; elsewhere the device chooses among those that are equal at the end of a table.

Shape letters: M drafts, V vocabulary, C chunks.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

CHUNK = 64
"""Tokens that are represented by their largest logit: every C-th one, so that a row is read from end to end."""
FIRST = 32
"""Tokens of a slot that are found at first."""
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
        self._logits, self._temperature = logits.detach(), temperature
        self.chances: list[list[float]] = [[] for _ in logits]
        self.ids: list[list[int]] = [[] for _ in logits]
        self._rows: dict[int, _Row] = {}
        self._scratch = torch.empty(0)  # new memory for every slot would cost as much as the exponentials in it
        if logits.device.type != "cpu":
            scaled = self._logits.float() / temperature
            top, ids = (of.cpu().numpy() for of in torch.topk(scaled, self._limit, dim=-1))
            order = np.lexsort((ids, -top), axis=1)
            chances = (
                np.take_along_axis(top, order, axis=1) - torch.logsumexp(scaled, dim=-1, keepdim=True).cpu().numpy()
            )
            self.chances, self.ids = (
                chances.astype(np.float64).tolist(),
                np.take_along_axis(ids, order, axis=1).tolist(),
            )

    def widen(self, slot: int) -> bool:
        """Finds a slot's first tokens, or else the others up to the limit; whether there were more."""
        found = len(self.ids[slot])
        if found >= self._limit:
            return False
        if not found:
            if not len(self._scratch):
                self._scratch = torch.empty(self._logits.shape[1])
            self._rows[slot] = _Row(self._logits[slot], self._temperature, self._scratch)
        row = self._rows[slot]
        tokens = row.largest(self._limit if found else min(FIRST, self._limit))[found:]
        self.chances[slot] += (row.values[tokens].astype(np.float64) - row.log_sum).tolist()
        self.ids[slot] += tokens.tolist()
        return True


class _Row:
    """One slot's logits, with the largest of every chunk and log Σ exp of all."""

    def __init__(self, logits: Tensor, temperature: float, scratch: Tensor) -> None:
        row = logits.float()
        row = (row if temperature == 1.0 else row / temperature).contiguous()
        self.values = row.numpy()
        self._num_chunks = len(row) // CHUNK
        whole = self._num_chunks * CHUNK
        self._rest = np.arange(whole, len(row))  # tokens at the end that are in no whole chunk
        self._maxima = self.values[:whole].reshape(CHUNK, self._num_chunks).max(axis=0)
        peak = float(max(self._maxima.max(initial=-math.inf), self.values[whole:].max(initial=-math.inf)))
        shift = peak if abs(peak) > SAFE else 0.0
        self.log_sum = shift + math.log(torch.exp(row - shift if shift else row, out=scratch).sum())

    def largest(self, width: int) -> np.ndarray:
        """Tokens of the ``width`` largest logits, falling, equal ones by ascending token."""
        if width < self._num_chunks:
            chunks = np.flatnonzero(self._maxima >= _nth_largest(self._maxima, width))
            inside = chunks + np.arange(CHUNK)[:, None] * self._num_chunks
            tokens = np.concatenate([inside.ravel(), self._rest])
        else:
            tokens = np.arange(len(self.values))
        values = self.values[tokens]
        high = np.flatnonzero(values >= _nth_largest(values, width))
        return tokens[high[np.lexsort((tokens[high], -values[high]))]][:width]


def _nth_largest(values: np.ndarray, place: int) -> np.floating:
    return np.partition(values, len(values) - place)[len(values) - place]
