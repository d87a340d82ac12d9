"""Samples that came before, exactly or nearly, and prompts that are held out.

Two samples are nearly the same where they share `NEAR` of their 5-grams. Candidates are found by MinHash [Broder 1997]:
of each sample the smallest hash in each of 32 bins, of which 8 at a time make one of `KEYS` keys. Samples with the
share s in common have a key in common with probability 1 - (1 - s^8)^4: 0.99 for s = 0.95, 0.9 for 0.9, 0.5 for 0.8.
The share of each candidate is then counted.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from paceline.data.rows import Conversation

NEAR = 0.8
"""Share of 5-grams from which two samples count as nearly the same."""
KEYS = 4
"""Keys of a sample, by which candidates for near-duplicates are found."""
_BINS, _GRAM = 32, 5
_MULTIPLIERS = np.random.default_rng(20260206).integers(1, 2**63, size=_GRAM, dtype=np.uint64) | np.uint64(1)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_EMPTY = np.uint64(2**64 - 1)
_TOKENS = 1 << 17
"""Tokens whose 5-grams are hashed at once, but for longer samples (about 6 MB)."""
_RECORD = np.dtype([("key", np.uint64), ("row", np.int64)])
_SHARE = 1 << 17
"""Records that are looked at at once (2 MB)."""
_MOST_FILES = 256


def content_hash(ids: np.ndarray) -> int:
    """64-bit hash of the token ids."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(ids).tobytes(), digest_size=8).digest(), "little")


def near_keys(ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Keys of samples: those that are nearly the same have at least one in common, in the same column.

    Args:
        ids: tokens of all samples, one after another.
        ends: int [samples + 1], 0 and the end of each; no sample is empty.

    Returns:
        uint64 [samples, KEYS].
    """
    cuts = [0]
    while cuts[-1] < len(ends) - 1:
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, ends[cuts[-1]] + _TOKENS, side="right")) - 1))
    parts = [
        _near_keys(ids[ends[start] : ends[stop]], ends[start : stop + 1] - ends[start])
        for start, stop in itertools.pairwise(cuts)
    ]
    return np.concatenate(parts) if parts else np.empty((0, KEYS), dtype=np.uint64)


def _near_keys(ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
    sample, grams = _grams(ids, ends)
    # One hash shared out to bins by its first bits, in place of one hash a bin [Li, Owen, Zhang 2012].
    place = sample * _BINS + (grams >> np.uint64(59)).astype(np.int64)
    smallest = np.full((len(ends) - 1) * _BINS, _EMPTY)
    np.minimum.at(smallest, place, grams)
    keys = np.zeros((len(ends) - 1, KEYS), dtype=np.uint64)
    # Neighbors are in different keys: in short samples many bins are filled from the next one.
    for column in _filled(smallest.reshape(-1, _BINS)).reshape(len(keys), -1, KEYS).transpose(1, 0, 2):
        keys = (keys ^ column) * _MIX
        keys ^= keys >> np.uint64(31)
    return keys


def _grams(ids: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sample and hash of every 5-gram; a sample of fewer than five tokens is one gram."""
    lengths, places = np.diff(ends), np.arange(len(ids))
    sample = np.repeat(np.arange(len(lengths)), lengths)
    left = ends[1:][sample] - places
    starts = (left >= _GRAM) | (places == ends[:-1][sample])
    grams = np.zeros(len(ids), dtype=np.uint64)
    padded = np.concatenate([ids.astype(np.uint64) + np.uint64(1), np.zeros(_GRAM, dtype=np.uint64)])
    for shift in range(_GRAM):
        grams = (grams * _MIX) ^ np.where(left > shift, padded[shift : shift + len(ids)] * _MULTIPLIERS[shift], 0)
        grams ^= grams >> np.uint64(29)
    return sample[starts], grams[starts] * _MIX


def are_near(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Whether the two samples of each pair (token ids, at least one each) share `NEAR` of their 5-grams, bool."""
    texts = [ids for pair in pairs for ids in pair]
    sample, grams = _grams(np.concatenate(texts), np.cumsum([0, *map(len, texts)]))
    order = np.lexsort((sample, grams, sample // 2))
    sample, grams = sample[order], grams[order]
    same_gram = np.r_[False, (grams[1:] == grams[:-1]) & (sample[1:] // 2 == sample[:-1] // 2)]
    again = same_gram & np.r_[False, sample[1:] == sample[:-1]]
    pair, both = sample[~again] // 2, same_gram[~again]
    shared = np.bincount(pair[both], minlength=len(pairs))
    return shared >= NEAR * (np.bincount(pair, minlength=len(pairs)) - shared)


def _filled(smallest: np.ndarray) -> np.ndarray:
    """Empty bins filled from the next full one, with an offset [Shrivastava, Li 2014]."""
    bins = np.arange(_BINS)
    full = np.where(smallest == _EMPTY, 2 * _BINS, bins)
    following = np.minimum.accumulate(np.concatenate([full, full + _BINS], axis=1)[:, ::-1], axis=1)[:, ::-1]
    source = following[:, :_BINS]
    return np.take_along_axis(smallest, source % _BINS, axis=1) + (source - bins).astype(np.uint64) * _MIX


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
                file.write(records[shares == share].tobytes())
        for file in files:
            file.seek(0)
            yield from _repeats_in(file)


def _repeats_in(file: IO[bytes]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    known = np.empty(0, dtype=_RECORD)
    while len(records := np.frombuffer(file.read(_SHARE * _RECORD.itemsize), dtype=_RECORD)):
        both = np.concatenate([known, records])
        known = both[np.unique(both["key"], return_index=True)[1]]
        first = known["row"][np.searchsorted(known["key"], records["key"])]
        again = first != records["row"]
        yield records["row"][again], first[again]


def prompt_of(conversation: Conversation) -> bytes:
    """What the user asked before the first answer, letter case and white space made alike, as UTF-8."""
    asked: list[str] = []
    for turn in conversation.messages:
        if turn["role"] == "assistant":
            break
        if turn["role"] == "user":
            asked.append(" ".join(str(turn["content"]).split()).casefold())
    return "\n".join(asked).encode("utf-8", "surrogatepass")


class HeldOutPrompts:
    """What is held out: prompts, to be found again exactly or nearly (by their bytes' 5-grams), and tokens, exactly.

    Args:
        prompts: from `prompt_of`.
        hashes: from `content_hash`, of samples.
    """

    def __init__(self, prompts: Iterable[bytes] = (), hashes: Iterable[int] = ()) -> None:
        self.prompts = frozenset(prompts)
        self._hashes = frozenset(hashes)
        self._alike: dict[tuple[int, int], list[bytes]] = {}
        for prompt, key in _keys_of(sorted(self.prompts)):
            self._alike.setdefault(key, []).append(prompt)

    def holds_tokens(self, ids: np.ndarray) -> bool:
        """Whether a sample of the same tokens is held out."""
        return bool(self._hashes) and content_hash(ids) in self._hashes

    def nearly_holds(self, prompts: Sequence[bytes]) -> set[bytes]:
        """Those of which nearly the same prompt is held out."""
        found = [(prompt, held) for prompt, key in _keys_of(prompts) for held in self._alike.get(key, ())]
        near = are_near([(_bytes(prompt), _bytes(held)) for prompt, held in found]) if found else ()
        return {prompt for prompt, _ in itertools.compress(found, near)}


def _keys_of(prompts: Sequence[bytes]) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Every prompt with each of its keys: column and key."""
    ids = np.concatenate([np.empty(0, np.uint8), *map(_bytes, prompts)])
    keys = near_keys(ids, np.cumsum([0, *(len(_bytes(prompt)) for prompt in prompts)])).tolist()
    return ((prompt, pair) for prompt, row in zip(prompts, keys, strict=True) for pair in enumerate(row))


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text or b"\0", dtype=np.uint8)
