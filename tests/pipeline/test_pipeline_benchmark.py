"""The benchmark names the slower stage from what the run reports, and chooses the split that ends first."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from paceline.check.memory_budget import best_split


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, which its workers import by name; its folder leaves the path again, for it holds common names."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("pipeline")


@pytest.mark.parametrize(
    ("target_us", "draft_us", "slower"), [(60.0, 20.0, "target"), (15.0, 120.0, "drafter"), (60.0, 60.0, "target")]
)
@pytest.mark.parametrize("delivery", ["ordered", "ready"])
def test_the_slower_stage_is_named(
    pipeline: Any, target_us: float, draft_us: float, slower: str, delivery: str
) -> None:
    load = pipeline.Load(target_us, draft_us, jitter=0.2, accumulate=3, tokens=400)
    found = pipeline.measure(load, 1, 1, delivery, windows=5)
    assert found.truth == found.bottleneck == slower


def test_several_workers_train_every_batch_in_its_window(pipeline: Any) -> None:
    load = pipeline.Load(20.0, 20.0, accumulate=2, tokens=200)
    found = pipeline.measure(load, 2, 2, "ready", windows=3)
    assert found.target_s > 0 and found.drafter_s > 0


@pytest.mark.parametrize(("target_us", "draft_us"), [(40.0, 60.0), (70.0, 20.0), (10.0, 90.0), (30.0, 30.0)])
def test_the_split_is_the_one_whose_slowest_stage_is_fastest(pipeline: Any, target_us: float, draft_us: float) -> None:
    """Against every split of 8 devices, by the loads of the very batches that would be run."""
    load = pipeline.Load(target_us, draft_us)

    def limit(targets: int, drafters: int) -> float:
        planned = pipeline.planned_batches(load, 60, 1)
        target = sum(map(load.target_s, planned)) / targets
        return max(target, sum(map(load.drafter_s, planned)) / drafters)

    planned = pipeline.planned_batches(load, 60, 1)
    means = [sum(map(work, planned)) / len(planned) for work in (load.target_s, load.drafter_s)]
    best = best_split(8, *means)
    assert limit(best.targets, best.drafters) == min(limit(count, 8 - count) for count in range(1, 8))


def test_jitter_is_repeatable_and_keeps_the_average(pipeline: Any) -> None:
    load = pipeline.Load()
    factors = [load.factor("target", index) for index in range(4000)]
    assert factors[:5] == [load.factor("target", index) for index in range(5)]
    assert sum(factors) / len(factors) == pytest.approx(1.0, abs=0.02)
    assert all(left != right for left, right in itertools.pairwise(factors))
