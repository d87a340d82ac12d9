"""Near-duplicates against the true share of common 5-grams."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.data import dedup
from paceline.data.dedup import NEAR, HeldOut, near_duplicates, repeats, signature


def grams(ids: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(ids[k : k + 5].tolist()) for k in range(max(1, len(ids) - 4))}


def test_share_of_equal_places_estimates_the_share_of_common_grams() -> None:
    rng = np.random.default_rng(0)
    errors: list[float] = []
    for changed in (0, 2, 5, 10, 40):
        for _ in range(40):
            one = rng.integers(0, 5000, size=400).astype(np.int32)
            other = one.copy()
            other[rng.choice(400, size=changed, replace=False)] += 7
            true = len(grams(one) & grams(other)) / len(grams(one) | grams(other))
            errors.append((signature(one) == signature(other)).mean() - true)
    assert abs(np.mean(errors)) < 0.02
    assert np.sqrt(np.mean(np.square(errors))) < 0.1


def test_short_samples_have_signatures_too() -> None:
    for length in (1, 2, 4, 5, 6):
        ids = np.arange(length, dtype=np.int32)
        assert (signature(ids) == signature(ids.copy())).all()
        assert (signature(ids) == signature(ids + 1)).mean() < NEAR


@pytest.mark.parametrize("stretch", [7, 1 << 14])
def test_near_duplicates_are_those_of_all_pairs(stretch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "_STRETCH", stretch)
    monkeypatch.setattr(dedup, "_SCATTERED", stretch // 3)
    rng = np.random.default_rng(1)
    samples = [rng.integers(0, 5000, size=300).astype(np.int32) for _ in range(30)]
    for row in range(0, 30, 3):
        twin = samples[row].copy()
        twin[5] += 1
        samples.append(twin)
    signatures = np.stack([signature(ids) for ids in samples])
    found: dict[int, int] = {}
    for rows, twins in near_duplicates(len(samples), lambda rows: signatures[rows], tmp_path):
        assert not found.keys() & set(rows.tolist())
        found.update(zip(rows.tolist(), twins.tolist(), strict=True))
    alike = {
        row: [k for k in range(row) if (signatures[k] == signatures[row]).mean() >= NEAR] for row in range(len(samples))
    }
    assert found == {row: twins[0] for row, twins in alike.items() if twins}
    assert len(found) >= 9 and min(found) >= 30


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
    prompts = HeldOut([long, b"hi", b"hi"])
    assert prompts.holds(long) and prompts.holds(b"hi") and not prompts.holds(long + b"!")
    assert prompts.nearly_holds(long + b" please") and not prompts.nearly_holds(b"something that is quite different")
    assert not HeldOut().holds(b"") and not HeldOut().nearly_holds(b"hi")
