"""The acceptance of a device: is what it computes right, and how fast, before any real run.

Four stages: A numbers against the CPU, B whole small runs, C speed of the parts at real sizes, D the pipeline at such
sizes. Each check passes, fails, or is skipped with the reason; figures go into one JSON that can be attached to a bug
report. With ``tiny`` the same code runs on a CPU in a minute or two, which is how it is tested.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.check.gpu_bench import Bench, Check
from paceline.check.gpu_numbers import NUMBERS
from paceline.check.gpu_runs import PIPELINE, RUNS
from paceline.check.gpu_speed import DRAFTER_SPEED
from paceline.check.gpu_target import TARGET_SPEED
from paceline.check.results import CheckResult
from paceline.device import description, own_device
from paceline.errors import PacelineError
from paceline.text import first_line


def gpu_checks(
    device: str, stages: Sequence[str], folder: Path, report: Callable[[str, CheckResult | None], None], *, tiny: bool
) -> dict[str, Any]:
    """Run stages of the acceptance.

    Args:
        device: under test.
        stages: letters of A, B, C, D.
        folder: scratch folder.
        report: called with the name of each check when it begins, and with its result when it ends.
        tiny: small sizes, for a CPU.

    Returns:
        Plain values: the machine, and every result.
    """
    checks: dict[str, dict[str, Check]] = {"A": NUMBERS, "B": RUNS, "C": TARGET_SPEED | DRAFTER_SPEED, "D": PIPELINE}
    own_device(device)
    bench = Bench(device, tiny, folder)
    results = []
    for stage in stages:
        for number, (name, check) in enumerate(checks[stage].items(), start=1):
            title = f"{stage}{number} {name}"
            report(title, None)
            began = time.perf_counter()
            result = _run(title, check, bench)
            results.append({**result.to_json(), "seconds": time.perf_counter() - began})
            report(title, result)
    return {"machine": machine(device), "tiny": tiny, "stages": list(stages), "results": results}


def _run(title: str, check: Check, bench: Bench) -> CheckResult:
    try:
        result = check(bench)
    # A kernel that does not compile, or an illegal access, is a result here and not the end.
    except (PacelineError, RuntimeError, ValueError, TypeError, AssertionError, OSError) as error:
        return CheckResult(title, "fail", f"{type(error).__name__}: {first_line(error)}", "attach the JSON to a report")
    return CheckResult(title, result.status, result.detail, result.advice, result.figures)


def machine(device: str) -> dict[str, Any]:
    """What the checks ran on."""
    return {
        "device": description(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "system": platform.platform(),
    }
