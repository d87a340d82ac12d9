from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from observed_runs import random_samples, report_of, write_manifest
from paceline.config import ObserveConfig, Settings, dump_settings
from paceline.observe.observer import open_observer


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run directory of ``steps`` optimizer steps and gives its path."""

    def make(steps: int = 40, name: str = "run", status: str = "finished", changes: dict | None = None) -> Path:
        run_dir = tmp_path / name
        settings = ObserveConfig(console="quiet", **(changes or {}))
        observer = open_observer(settings, run_dir, total_steps=steps, header={"samples_per_epoch": 12 * steps})
        (run_dir / "settings.yaml").write_text(dump_settings(Settings(run_dir=str(run_dir), target={"path": "small"})))
        (run_dir / "run.json").write_text(json.dumps({"versions": {"paceline": "0.1.0"}, "drafter": {"block_size": 4}}))
        write_manifest(run_dir)
        rng = np.random.default_rng(0)
        for step in range(1, steps + 1):
            observer.gauge("queue/features_items", 3)
            observer.gauge("queue/features_bytes", 2048)
            observer.step(report_of(step, random_samples(rng)))
        observer.close(status)
        return run_dir

    return make
