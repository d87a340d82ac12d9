"""Samples that came before, exactly or nearly, and prompts that are held out.

Near-duplicates are found by MinHash over token 5-grams [Broder 1997]: `SIGNATURE` smallest hashes a sample, compared in
bands of four places and then whole.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from paceline.data.rows import Conversation

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
_RECORD = np.dtype([("key", np.uint64), ("row", np.int64)])
_SHARE = 1 << 17
"""Records that are looked at at once (2 MB)."""
_MOST_FILES = 256
_STRETCH = 1 << 14
"""Signatures that are read at once in their order (2 MB)."""
_SCATTERED = 1 << 8
"""Signatures that are read at once from anywhere: mapped, each takes up to 64 kB of the file into memory."""


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


def repeats(chunks: Iterable[np.ndarray], num_rows: int, folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows whose key came earlier, with the first row of that key: two int64 arrays a time, each row once, in no order.

    Keys are shared out by their value to files, about `_SHARE` to each, and looked at file by file: memory does not
    grow with the rows (but for distinct keys beyond `_MOST_FILES · _SHARE`, 34 million).

    Args:
        chunks: uint64 keys of row 0, 1, 2 ...
        num_rows: about how many.
        folder: where the files are; they have no names there, and are gone when they are closed.
    """
    count = min(_MOST_FILES, 1 + num_rows // _SHARE)
    row = 0
    with ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(count)]
        for keys in chunks:
            records = np.empty(len(keys), dtype=_RECORD)
            records["key"], records["row"] = keys, np.arange(row, row + len(keys))
            row += len(keys)
            shares = keys % np.uint64(count)
            for share, file in enumerate(files):
                records[shares == share].tofile(file)
        for file in files:
            file.seek(0)
            yield from _repeats_in(file)


def _repeats_in(file: IO[bytes]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    known = np.empty(0, dtype=_RECORD)
    while len(records := np.fromfile(file, dtype=_RECORD, count=_SHARE)):
        both = np.concatenate([known, records])
        known = both[np.unique(both["key"], return_index=True)[1]]
        first = known["row"][np.searchsorted(known["key"], records["key"])]
        again = first != records["row"]
        yield records["row"][again], first[again]


def near_duplicates(
    num_samples: int, signatures: Callable[[np.ndarray], np.ndarray], folder: Path
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Samples that nearly equal an earlier one, with that one: two int64 arrays a time, each sample once, in no order.

    Args:
        num_samples: how many.
        signatures: rows → uint32 [rows, SIGNATURE]; asked in stretches, so that they need not be in memory at once.
        folder: for files of keys.
    """
    found = np.zeros(num_samples, dtype=bool)
    for band in range(SIGNATURE // _BAND):
        places = range(band * _BAND, (band + 1) * _BAND)
        keys = (_band_keys(signatures(rows), places) for rows in _stretches(num_samples, _STRETCH))
        for members, leaders in repeats(keys, num_samples, folder):
            new = ~found[members]
            members, leaders = members[new], leaders[new]
            for rows in _stretches(len(members), _SCATTERED):
                alike = (signatures(members[rows]) == signatures(leaders[rows])).mean(axis=1) >= NEAR
                found[members[rows[alike]]] = True
                yield members[rows[alike]], leaders[rows[alike]]


def _stretches(count: int, size: int) -> Iterator[np.ndarray]:
    return (np.arange(start, min(start + size, count)) for start in range(0, count, size))


def _band_keys(part: np.ndarray, places: Iterable[int]) -> np.ndarray:
    keys = np.zeros(len(part), dtype=np.uint64)
    for place in places:
        keys = (keys ^ part[:, place]) * _MIX
        keys ^= keys >> np.uint64(31)
    return keys


def prompt_of(conversation: Conversation) -> bytes:
    """What the user asked before the first answer, letter case and white space levelled, as UTF-8."""
    asked: list[str] = []
    for turn in conversation.messages:
        if turn["role"] == "assistant":
            break
        if turn["role"] == "user":
            asked.append(" ".join(str(turn["content"]).split()).casefold())
    return "\n".join(asked).encode("utf-8", "surrogatepass")


class HeldOut:
    """What is held out: prompts, to be found again exactly or nearly (by their bytes' 5-grams), and tokens, exactly.

    Args:
        prompts: from `prompt_of`.
        hashes: from `content_hash`, of samples.
    """

    def __init__(self, prompts: Iterable[bytes] = (), hashes: Iterable[int] = ()) -> None:
        self._hashes = frozenset(hashes)
        distinct = list(dict.fromkeys(prompts))
        self._exact = frozenset(hashlib.blake2b(prompt, digest_size=8).digest() for prompt in distinct)
        self._signatures = np.stack([_byte_signature(prompt) for prompt in distinct]) if distinct else None

    def holds_tokens(self, ids: np.ndarray) -> bool:
        """Whether a sample of the same tokens is held out."""
        return bool(self._hashes) and content_hash(ids) in self._hashes

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
