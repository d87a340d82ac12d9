from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from observe.wandb_file import history, records
from observed_runs import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.errors import TrackerError
from paceline.observe.metrics_file import EventLine, StepLine, read_lines
from paceline.observe.observer import open_observer

SAMPLES = random_samples(np.random.default_rng(0))


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """Whatever would connect goes to a port where nobody listens, and no key is known."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


def train(run_dir: Path, steps: range, first_step: int = 0, **changes) -> None:
    settings = ObserveConfig(console="quiet", wandb="offline", wandb_project="drafts", **changes)
    header = {"target": "small", "versions": {"torch": "2"}}
    observer = open_observer(settings, run_dir, total_steps=steps[-1], header=header, first_step=first_step)
    for step in steps:
        observer.step(report_of(step, SAMPLES))
    observer.event("checkpoint", path=Path("checkpoints/step-00000003"))
    observer.close("finished")


def run_files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))


def test_an_offline_run_holds_every_step_under_one_id(tmp_path):
    run_dir = tmp_path / "first"
    train(run_dir, range(1, 6))
    train(run_dir, range(4, 9), first_step=3)
    first, second = run_files(run_dir)
    lines = [line for line in read_lines(run_dir / "metrics.jsonl")[0] if isinstance(line, StepLine)]
    by_step = {line.step: line.values for line in lines}
    for path, steps in ((first, range(1, 6)), (second, range(4, 9))):
        rows = [row for row in history(path) if "step" in row]
        assert [row["step"] for row in rows] == list(steps)
        for row in rows:
            expected = {
                k: v
                for k, v in by_step[row["step"]].items()
                if v is not None and not k.startswith(("progress/", "memory"))
            }
            assert {k: row[k] for k in expected} == pytest.approx(expected)
    runs = [next(r.run for r in records(path) if r.WhichOneof("record_type") == "run") for path in (first, second)]
    assert runs[0].run_id == runs[1].run_id and runs[0].project == "drafts" and runs[0].display_name == "first"
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["target"] == "small" and config["versions"] == {"torch": "2"}
    metrics = [r.metric for r in records(first) if r.WhichOneof("record_type") == "metric"]
    assert any(m.glob_name == "*" and m.step_metric == "step" for m in metrics)
    assert not [
        e for e in read_lines(run_dir / "metrics.jsonl")[0] if isinstance(e, EventLine) and e.event == "warning"
    ]


def test_online_without_a_key_is_refused_before_any_work(tmp_path):
    with pytest.raises(TrackerError, match=r"observe.wandb = online needs a key; run `wandb login`"):
        open_observer(ObserveConfig(console="quiet", wandb="online"), tmp_path / "run", total_steps=1, header={})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_online_without_network_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    settings = ObserveConfig(console="quiet", wandb="online", tracker_start_limit_s=3.0)
    with pytest.raises(TrackerError, match=r"^wandb (cannot start|did not start within 3 s)"):
        open_observer(settings, tmp_path / "run", total_steps=1, header={})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_missing_package_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "wandb.py").write_text("raise ImportError('No module named wandb')")
    monkeypatch.syspath_prepend(tmp_path / "shadow")
    with pytest.raises(
        TrackerError, match=r"^observe.wandb is on, its package is missing; pip install 'paceline\[wandb\]'"
    ):
        open_observer(ObserveConfig(console="quiet", wandb="offline"), tmp_path / "run", total_steps=1, header={})


PROGRAM = """
import os, select, signal, sys
from pathlib import Path
import numpy as np
from observed_runs import random_samples, report_of
from paceline.config import ObserveConfig
from paceline.observe.observer import open_observer

settings = ObserveConfig(console="quiet", wandb="offline", tracker_queue_lines=8, tracker_close_limit_s=1.0)
observer = open_observer(settings, Path(sys.argv[1]), total_steps=400, header={})
words = {p: p.read_text().split(chr(0)) for p in Path("/proc").glob("[0-9]*/cmdline")}
child = str(observer._trackers[0]._process.pid)
services = [int(p.parent.name) for p, w in words.items() if "wandb-core" in w[0] and w[3:5] == ["--pid", child]]
assert len(services) == 1, services
samples = random_samples(np.random.default_rng(0))
"""


def run_program(run_dir: Path, rest: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + rest, str(run_dir)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
    )


@pytest.mark.parametrize("frozen", ["services[0]", "int(child)"])
def test_a_frozen_tracker_never_holds_up_the_run_or_its_end(tmp_path, frozen):
    done = run_program(
        tmp_path / "run",
        f"""
os.kill({frozen}, signal.SIGSTOP)
for step in range(1, 401):
    observer.step(report_of(step, samples))
observer.close()
os.kill(services[0], signal.SIGKILL)
print("closed")
""",
    )
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
    assert "wandb does not keep up" in done.stderr
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")[0]
    assert sum(isinstance(line, StepLine) for line in lines) == 400


def test_a_killed_run_leaves_a_tracker_that_can_be_read(tmp_path):
    done = run_program(
        tmp_path / "run",
        """
for step in range(1, 4):
    observer.step(report_of(step, samples))
for _ in range(200):
    if not observer._trackers[0]._queue:
        break
    select.select([], [], [], 0.05)
select.select([], [], [], 0.2)  # the last line has left the queue; now it is in the pipe
print(child)
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    child = int(done.stdout)
    for _ in range(200):
        if not Path(f"/proc/{child}").exists():
            break
        select.select([], [], [], 0.05)
    (path,) = run_files(tmp_path / "run")
    assert [row["step"] for row in history(path) if "step" in row] == [1, 2, 3]
    assert [r.exit.exit_code for r in records(path) if r.WhichOneof("record_type") == "exit"] == [1]
