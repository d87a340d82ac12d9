"""Samples that came before, exactly or nearly, and prompts that are held out.

Near-duplicates are found by MinHash over token 5-grams [Broder 1997]: `SIGNATURE` smallest hashes a sample, compared in
bands of four places and then whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from paceline.data.conversation import Conversation

SIGNATURE = 32
_BAND = 4
_GRAM = 5
NEAR = 0.8
"""Share of equal signature places from which two samples count as nearly the same."""
_KEYS = np.random.default_rng(20260206).integers(1, 2**63, size=_GRAM, dtype=np.uint64) | np.uint64(1)
_BIN_BITS = SIGNATURE.bit_length() - 1
_BINS = np.arange(SIGNATURE, dtype=np.uint64)
_EDGES = _BINS << np.uint64(64 - _BIN_BITS)
_MIX = np.uint64(0x9E3779B97F4A7C15)


def content_hash(ids: np.ndarray) -> int:
    """64-bit hash of the token ids."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(ids).tobytes(), digest_size=8).digest(), "little")


def signature(ids: np.ndarray) -> np.ndarray:
    """MinHash signature of the 5-grams, uint32 [SIGNATURE]; of the ids themselves where there are fewer than five.

    One permutation in `SIGNATURE` bins [Li, Owen, Zhang 2012], empty bins filled from the next full one with an offset
    [Shrivastava, Li 2014]: one sort a sample instead of `SIGNATURE` hashes.
    """
    rolled = ids.astype(np.uint64)
    length = max(1, len(rolled) - _GRAM + 1)
    grams = np.zeros(length, dtype=np.uint64)
    for shift in range(min(_GRAM, len(rolled))):
        grams = (grams * _MIX) ^ (rolled[shift : shift + length] * _KEYS[shift])
        grams ^= grams >> np.uint64(29)
    grams *= _MIX
    grams.sort()
    places = np.searchsorted(grams, _EDGES)
    found = grams[np.minimum(places, length - 1)]
    full = (places < length) & (found >> np.uint64(64 - _BIN_BITS) == _BINS)
    after = np.flatnonzero(full)
    source = after[np.searchsorted(after, np.arange(SIGNATURE)) % len(after)]
    offset = (source - np.arange(SIGNATURE)) % SIGNATURE
    return ((found[source] >> np.uint64(16)) + offset.astype(np.uint64) * _MIX).astype(np.uint32)


def first_of_each(hashes: np.ndarray) -> np.ndarray:
    """True where a hash stands for the first time, bool [num_samples]."""
    first = np.zeros(len(hashes), dtype=bool)
    first[np.unique(hashes, return_index=True)[1]] = True
    return first


def near_duplicates(num_samples: int, signatures: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """For each sample the earlier one that it nearly equals, or -1; int64 [num_samples].

    Args:
        num_samples: how many.
        signatures: rows → uint32 [rows, SIGNATURE]; asked in stretches, so that they need not be in memory at once.
    """
    twin = np.full(num_samples, -1, dtype=np.int64)
    step = 65_536
    for band in range(SIGNATURE // _BAND):
        columns = slice(band * _BAND, (band + 1) * _BAND)
        keys = np.zeros(num_samples, dtype=np.uint64)
        for start in range(0, num_samples, step):
            rows = np.arange(start, min(start + step, num_samples))
            part = signatures(rows)[:, columns].astype(np.uint64)
            for place in range(_BAND):
                keys[rows] = (keys[rows] ^ part[:, place]) * _MIX
                keys[rows] ^= keys[rows] >> np.uint64(31)
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        leader = first[inverse]
        members = np.flatnonzero((leader != np.arange(num_samples)) & (twin < 0))
        for start in range(0, len(members), step):
            rows = members[start : start + step]
            alike = (signatures(rows) == signatures(leader[rows])).mean(axis=1)
            twin[rows[alike >= NEAR]] = leader[rows[alike >= NEAR]]
    return twin


def prompt_of(conversation: Conversation) -> bytes:
    """What the user asked before the first answer, letter case and white space levelled, as UTF-8."""
    asked: list[str] = []
    for turn in conversation.messages:
        if turn["role"] == "assistant":
            break
        if turn["role"] == "user":
            asked.append(" ".join(str(turn["content"]).split()).casefold())
    return "\n".join(asked).encode("utf-8", "surrogatepass")


class Prompts:
    """Held-out prompts, to be found again exactly or nearly (by their bytes' 5-grams).

    Args:
        prompts: from `prompt_of`.
    """

    def __init__(self, prompts: Iterable[bytes] = ()) -> None:
        distinct = list(dict.fromkeys(prompts))
        self._exact = frozenset(hashlib.blake2b(prompt, digest_size=8).digest() for prompt in distinct)
        self._signatures = np.stack([_byte_signature(prompt) for prompt in distinct]) if distinct else None

    def holds(self, prompt: bytes) -> bool:
        """Whether the same prompt is held out."""
        return hashlib.blake2b(prompt, digest_size=8).digest() in self._exact

    def nearly_holds(self, prompt: bytes) -> bool:
        """Whether a prompt that shares four fifths of its 5-grams is held out."""
        if self._signatures is None:
            return False
        return bool(((self._signatures == _byte_signature(prompt)).mean(axis=1) >= NEAR).any())


def _byte_signature(text: bytes) -> np.ndarray:
    return signature(np.frombuffer(text or b"\0", dtype=np.uint8))
