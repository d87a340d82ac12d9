"""Near-duplicates against the true share of common 5-grams, repeats against a dictionary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.data import dedup
from paceline.data.dedup import KEYS, NEAR, HeldOutPrompts, are_near, near_keys, repeats


def grams(ids: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(ids[k : k + 5].tolist()) for k in range(max(1, len(ids) - 4))}


def share(one: np.ndarray, other: np.ndarray) -> float:
    return len(grams(one) & grams(other)) / len(grams(one) | grams(other))


def changed(ids: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    other = ids.copy()
    other[rng.choice(len(ids), size=count, replace=False)] += 7
    return other


def keys_of(samples: list[np.ndarray]) -> np.ndarray:
    return near_keys(np.concatenate(samples), np.cumsum([0, *map(len, samples)]))


def test_pairs_are_near_where_their_share_of_grams_says_so() -> None:
    rng = np.random.default_rng(0)
    pairs = []
    for length in (1, 2, 4, 5, 6, 40, 300):
        for count in (0, 1, 3, 8, 11):
            # Few distinct ids: the same gram comes several times in a sample.
            one = rng.integers(0, 4 if count == 3 else 5000, size=length).astype(np.int32)
            pairs += [(one, changed(one, min(count, length), rng)), (one, np.r_[one, one[:count]])]
    shares = np.array([share(*pair) for pair in pairs])
    assert are_near(pairs).tolist() == (shares >= NEAR).tolist()
    assert 10 < (shares >= NEAR).sum() < len(pairs) - 10


@pytest.mark.parametrize("length", [12, 60, 400])
def test_near_samples_mostly_have_a_key_in_common(length: int) -> None:
    rng = np.random.default_rng(1)
    for count in (0, 1, 4, length // 6):
        samples, shares = [], []
        for _ in range(400):
            one = rng.integers(0, 5000, size=length).astype(np.int32)
            samples += [one, changed(one, count, rng)]
            shares.append(share(*samples[-2:]))
        keys = keys_of(samples)
        found = (keys[::2] == keys[1::2]).any(axis=1).mean()
        assert abs(found - np.mean(1 - (1 - np.array(shares) ** 8) ** KEYS)) < 0.08, (count, found)


@pytest.mark.parametrize("at_once", [1, 50, 1 << 17])
def test_keys_of_a_sample_do_not_depend_on_its_neighbors(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    samples = [rng.integers(0, 9, size=length).astype(np.int32) for length in (1, 4, 5, 6, 200, 3, 90)]
    alone = np.concatenate([keys_of([ids]) for ids in samples])
    monkeypatch.setattr(dedup, "_TOKENS", at_once)
    assert np.array_equal(keys_of(samples), alone)
    assert len(np.unique(alone[:, 0])) == len(samples)
    assert near_keys(np.empty(0, np.int32), np.zeros(1, np.int64)).shape == (0, KEYS)


@pytest.mark.parametrize("share", [3, 50, 1 << 17])
@pytest.mark.parametrize("distinct", [1, 40, 10**9])
def test_repeats_are_those_of_a_dictionary(
    share: int, distinct: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup, "_SHARE", share)
    keys = np.random.default_rng(0).integers(0, distinct, size=300).astype(np.uint64)
    first: dict[int, int] = {}
    expected = {row: first[key] for row, key in enumerate(keys.tolist()) if first.setdefault(key, row) != row}
    chunks = np.split(keys, [0, 5, 120])
    told = [pair for rows, firsts in repeats(chunks, 300, tmp_path) for pair in zip(rows, firsts, strict=True)]
    assert sorted(told) == sorted(expected.items()) and len(told) == 300 - len(first)
    assert list(tmp_path.iterdir()) == []


def test_held_out_prompts_are_found_exactly_and_nearly() -> None:
    long = b"explain how the tide depends on the moon and on the shape of the coast, in three sentences"
    held = HeldOutPrompts([long, b"hi", b"hi", b""])
    assert held.prompts == {long, b"hi", b""}
    asked = [b"hi", b"ho", long, long + b"!", b"something that is quite different", long[20:], b""]
    assert held.nearly_holds(asked) == {b"hi", long, long + b"!", b""}
    assert HeldOutPrompts().nearly_holds(asked) == set() == held.nearly_holds([])


def test_prompts_of_one_pattern_are_not_nearly_the_same() -> None:
    held = HeldOutPrompts(f"write a class `{name}` that keeps the fields `{name[:3]}`".encode() for name in NAMES[::2])
    assert (
        held.nearly_holds([f"write a class `{name}` that keeps `{name[1:]}`".encode() for name in NAMES[1::2]]) == set()
    )


NAMES = ["".join(np.random.default_rng(k).choice(list("abcdefghijklmnop"), 9)) for k in range(400)]
