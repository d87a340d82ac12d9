from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from observed_runs import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, StepLine, read_lines
from paceline.observe.observer import open_observer

SAMPLES = random_samples(np.random.default_rng(0))


def train(run_dir: Path, steps: range, first_step: int = 0, **changes) -> dict[int, StepLine]:
    settings = ObserveConfig(console="quiet", **changes)
    observer = open_observer(settings, run_dir, total_steps=8, header={"target": "small"}, first_step=first_step)
    for step in steps:
        observer.step(report_of(step, SAMPLES, gradient_norm=float(first_step + step)))
    observer.event("checkpoint", path="checkpoints/step-00000003")
    observer.close()
    lines = read_lines(run_dir / "metrics.jsonl")[0]
    assert not [line for line in lines if isinstance(line, EventLine) and line.event == "warning"]
    return {line.step: line for line in lines if isinstance(line, StepLine)}


def test_tensorboard_reads_back_every_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, range(1, 6), tensorboard=True)
    lines = train(tmp_path, range(4, 9), first_step=3, tensorboard=True)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    for name in ("loss", "tau", "gradient/norm", "loss/bucket_3"):
        rows = {event.step: event.value for event in found.Scalars(name)}
        assert rows == pytest.approx({step: line.values[name] for step, line in lines.items()}), name
        assert len(found.Scalars(name)) == 8
    assert b'"target": "small"' in found.Tensors("header/text_summary")[0].tensor_proto.string_val[0]
    assert b"step-00000003" in found.Tensors("event/checkpoint/text_summary")[0].tensor_proto.string_val[0]


def test_trackio_holds_every_step(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    lines = train(tmp_path / "first", range(1, 6), trackio=True, wandb_project="drafts")
    program = (
        "import json\nfrom trackio.sqlite_storage import SQLiteStorage\n"
        "print(json.dumps(SQLiteStorage.get_logs('drafts', 'first')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["step"] for row in rows] == list(range(1, 6))
    for row in rows:
        values = lines[row["step"]].values
        assert {name: row[name] for name in values} == pytest.approx(values)


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_missing_package_is_refused_before_any_work(tmp_path, monkeypatch, name):
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / f"{name}.py").write_text("raise ImportError('not installed')")
    monkeypatch.syspath_prepend(tmp_path / "shadow")
    with pytest.raises(
        TrackerError, match=rf"^observe.{name} is on, its package is missing; pip install 'paceline\[{name}"
    ):
        open_observer(ObserveConfig(console="quiet", **{name: True}), tmp_path / "run", total_steps=1, header={})
