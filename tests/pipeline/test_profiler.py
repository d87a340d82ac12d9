"""torch's profiler over a window of steps: a file that opens, and nothing on the terminal that is not ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.pipeline.profiler import clear_profile

PROGRAM = """
import os, sys
from pathlib import Path
import torch
from paceline.pipeline import profiler
from paceline.pipeline.profiler import StepProfile

steps = StepProfile([2, 3], Path(sys.argv[1]))
for step in range(1, 5):
    steps.before(step)
    torch.ones(4, 4) @ torch.ones(4, 4)
    steps.after(step)
with profiler.without_marks():
    os.write(2, b"USDT:a mark\\nERROR: gpuGetDeviceCount failed with code 35\\nan error of somebody\\n")
print("after", file=sys.stderr)
"""


def test_a_profile_opens_and_prints_nothing(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stderr == "an error of somebody\nafter\n"
    assert any("mm" in event.get("name", "") for event in json.loads(path.read_text())["traceEvents"])


@pytest.mark.parametrize(
    ("steps", "first_step", "kept"), [([35, 36], 40, True), ([35, 36], 20, False), (None, 40, False)]
)
def test_going_on_behind_the_profiled_steps_keeps_their_profile(
    tmp_path: Path, steps: list[int] | None, first_step: int, kept: bool
) -> None:
    path = tmp_path / "profile.json"
    clear_profile(steps, path, first_step)  # nothing there is no error
    path.write_text("{}")
    clear_profile(steps, path, first_step)
    assert path.exists() == kept
