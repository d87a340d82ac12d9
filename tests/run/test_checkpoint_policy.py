"""When checkpoints are due, and what they note."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.atomic_files import ASIDE
from paceline.checkpoint import checkpoints
from paceline.checkpoint.retention import Best
from paceline.config import CheckpointConfig
from paceline.errors import ConfigError, RunDirectoryError
from paceline.run.checkpoint_policy import CheckpointPolicy, await_written, best_of
from paceline.types import PlannedStep


class Known:
    """What an observer would know."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[int, float]] = {}
        self.events: list[int] = []
        self.gone: str | None = None

    def event(self, kind: str, **fields: Any) -> None:
        assert kind == "checkpoint"
        self.events.append(fields["step"])

    def newest(self, name: str) -> tuple[int, float] | None:
        return self.values.get(name)

    def lost(self) -> str | None:
        return self.gone


def saving(known: Known, clock: list[float], first_step: int = 0, **config: Any) -> CheckpointPolicy:
    steps = [PlannedStep(s, 0, s - 1, range(2 * s - 2, 2 * s), save=s % 5 == 0) for s in range(1, 21)]
    settings = SimpleNamespace(checkpoint=CheckpointConfig(**config))
    run: Any = SimpleNamespace(settings=settings, steps=steps, first_step=first_step, run_dir=Path("nowhere"))
    return CheckpointPolicy(run, known, clock=lambda: clock[0])


def planned(step: int) -> PlannedStep:
    return PlannedStep(step, 0, step - 1, range(2), save=step % 5 == 0)


def test_by_steps_and_by_time_since_the_one_before() -> None:
    clock = [100.0]
    saves = saving(Known(), clock, every_minutes=2.0)
    assert not saves.due(planned(1)) and saves.due(planned(5))
    clock[0] += 119
    assert not saves.due(planned(6))
    clock[0] += 2
    assert saves.due(planned(6))
    saves.announce(6)
    assert not saves.due(planned(7))
    clock[0] += 121
    assert saves.due(planned(8))


def test_without_minutes_time_does_not_matter() -> None:
    clock = [0.0]
    saves = saving(Known(), clock)
    clock[0] = 1e9
    assert not saves.due(planned(4)) and saves.due(planned(5))


def test_a_metric_counts_for_the_next_checkpoint() -> None:
    known = Known()
    saves = saving(known, [0.0], keep_best="validation/loss")
    known.values = {"validation/loss": (3, 2.5), "loss": (5, 1.0)}
    best = {"metric": "validation/loss", "better": "lower"}
    place = {"epoch": 0, "window": 4, "micro_batches": 10}
    assert saves.announce(5) == {**place, "best_by": best, "metrics": {"validation/loss": 2.5}}
    assert saves.announce(10)["metrics"] == {}
    known.values["validation/loss"] = (15, 2.0)
    assert saves.announce(15)["metrics"] == {"validation/loss": 2.0}
    assert saves.announce(15)["metrics"] == {"validation/loss": 2.0}
    assert known.events == [5, 10, 15]


def test_held_out_tau_is_noted_whatever_is_kept() -> None:
    known = Known()
    saves = saving(known, [0.0])
    known.values = {"validation/tau": (5, 2.5), "validation/loss": (5, 3.0)}
    note = saves.announce(5)
    assert (note["best_by"], note["metrics"]) == (None, {"validation/tau": 2.5})


def test_an_open_checkpoint_is_finished_after_an_error(tmp_path: Path) -> None:
    known = checkpoints.checkpoint_path(tmp_path, 3).with_name(f"step-00000003{ASIDE}")
    final = checkpoints.checkpoint_path(tmp_path, 8)
    part = final.with_name(final.name + ASIDE)
    for path in (known, part):
        path.mkdir(parents=True)
    asked: list[int] = []

    def is_alive() -> bool:
        asked.append(1)
        if len(asked) == 5:
            part.replace(final)
        return True

    await_written(tmp_path, {known.name}, is_alive)
    assert len(asked) == 5 and checkpoints.being_written(tmp_path) == {known.name}
    part.mkdir()
    await_written(tmp_path, set(), lambda: False)
    await_written(tmp_path, set(), lambda: True, limit_s=0.05)
    assert part.is_dir()


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("validation/loss", Best("validation/loss", "lower")),
        ("tau", Best("tau", "higher")),
        ("decode/tau", Best("decode/tau", "higher")),
        ("validation/acceptance/streak", Best("validation/acceptance/streak", "higher")),
        (None, None),
    ],
)
def test_the_catalogue_says_which_values_are_better(name: str | None, best: Best | None) -> None:
    assert best_of(name) == best


@pytest.mark.parametrize("name", ["progress/epoch", "validation/nothing", "nothing", "decode/seconds"])
def test_a_metric_that_cannot_be_better_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"checkpoint.keep_best = '{name}': "):
        best_of(name)


def test_a_lost_metrics_file_is_said_after_the_checkpoint() -> None:
    known = Known()
    saves = saving(known, [0.0])
    saves.announce(5)
    saves.check()
    known.gone = "metrics.jsonl: was removed"
    saves.announce(10)
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl: was removed; the checkpoint of step 10 is kept"):
        saves.check()
