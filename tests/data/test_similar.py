"""Near-duplicates against the true share of common 5-grams."""

from __future__ import annotations

import numpy as np

from paceline.data.similar import NEAR, Prompts, first_of_each, near_duplicates, signature


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


def test_near_duplicates_are_those_of_all_pairs() -> None:
    rng = np.random.default_rng(1)
    samples = [rng.integers(0, 5000, size=300).astype(np.int32) for _ in range(30)]
    for row in range(0, 30, 3):
        twin = samples[row].copy()
        twin[5] += 1
        samples.append(twin)
    signatures = np.stack([signature(ids) for ids in samples])
    found = near_duplicates(len(samples), lambda rows: signatures[rows])
    for row in range(len(samples)):
        alike = [k for k in range(row) if (signatures[k] == signatures[row]).mean() >= NEAR]
        assert found[row] == (alike[0] if alike else -1)
    assert (found[30:] == np.arange(0, 30, 3)).mean() >= 0.9 and (found[:30] == -1).all()


def test_first_of_each() -> None:
    assert first_of_each(np.array([3, 1, 3, 2, 1], dtype=np.uint64)).tolist() == [True, True, False, True, False]


def test_held_out_prompts_are_found_exactly_and_nearly() -> None:
    long = b"explain how the tide depends on the moon and on the shape of the coast, in three sentences"
    prompts = Prompts([long, b"hi", b"hi"])
    assert prompts.holds(long) and prompts.holds(b"hi") and not prompts.holds(long + b"!")
    assert prompts.nearly_holds(long + b" please") and not prompts.nearly_holds(b"something that is quite different")
    assert not Prompts().holds(b"") and not Prompts().nearly_holds(b"hi")
