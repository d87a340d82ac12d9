"""The checks of a run in order; each that fails takes those with it that build on it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from paceline.check.context import CheckContext, CheckLimits
from paceline.check.data_checks import check_data, check_mask_token, check_template
from paceline.check.model_checks import check_decode, check_overfit, check_taps, check_target
from paceline.check.results import CheckResult
from paceline.check.run_checks import check_disk, check_memory, check_plan, check_split, check_time
from paceline.checkpoint import run_directory
from paceline.checkpoint.checkpoints import steps
from paceline.config import Settings
from paceline.errors import PacelineError
from paceline.export.engines import training_notes
from paceline.run.support import check_support
from paceline.run.warm_start import check_init


def check_settings(context: CheckContext) -> CheckResult:
    """Devices and combinations of settings; the run directory, whether it is this run's or free."""
    check_support(context.settings)
    flow, run_dir = context.settings.flow, Path(context.settings.run_dir)
    run_directory.check_run(context.settings)
    run_directory.check_writable(run_dir)
    detail = f"{flow.mode}: {flow.target_devices} → {flow.drafter_devices}"
    if run_directory.is_run_directory(run_dir):
        detail += f"; resumes the run there, at step {max(steps(run_dir), default=0)}"
    return CheckResult("settings", "pass", detail)


def check_drafter(context: CheckContext) -> CheckResult:
    """Configuration of the target, taps and drafter, from files alone."""
    facts, taps, spec = context.facts, context.models.taps, context.spec
    settings, run_dir = context.settings, Path(context.settings.run_dir)
    run_directory.check_run(settings, {"drafter": spec.to_dict(), "target": dict(facts.identity)})
    if settings.drafter.init is not None and not steps(run_dir):
        check_init(settings, spec)
    detail = (
        f"{spec.num_layers} layers, block {spec.block_size}, hidden {spec.hidden_size}, for {facts.architecture} with "
        f"{facts.num_layers} layers, taps {taps}, mask token {context.models.mask}"
        + (", a spare one: the tokenizer has no mask token" if context.models.mask.note else "")
    )
    notes = training_notes(spec)
    return CheckResult("drafter", "warn" if notes else "pass", detail, "; ".join(notes))


CHECKS: dict[str, tuple[Callable[[CheckContext], CheckResult], tuple[str, ...]]] = {
    "settings": (check_settings, ()),
    "drafter": (check_drafter, ("settings",)),
    "data": (check_data, ("drafter",)),
    "template": (check_template, ("data",)),
    "plan": (check_plan, ("data",)),
    "disk": (check_disk, ("plan",)),
    "target": (check_target, ("drafter",)),
    "mask token": (check_mask_token, ("data", "target")),
    "taps": (check_taps, ("data", "target")),
    "overfit": (check_overfit, ("taps", "mask token")),
    "decoding": (check_decode, ("overfit",)),
    "memory": (check_memory, ("taps", "plan", "mask token")),
    "time": (check_time, ("memory",)),
    "split": (check_split, ("time",)),
}
"""Name → the check, and the checks that must not have failed."""


def preflight(
    settings: Settings, limits: CheckLimits, report: Callable[[str, CheckResult | None], None]
) -> list[CheckResult]:
    """Run all checks of a run.

    Args:
        settings: of the run.
        limits: how much is done.
        report: called with the name of each check when it begins, and with its result when it ends.

    Returns:
        A result for each check, in order. Nothing of the run is written: what has to be made is in a scratch folder.
    """
    torch.set_num_threads(settings.flow.threads)
    results: dict[str, CheckResult] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder:
        context = CheckContext(settings, Path(folder), limits)
        for name, (check, needs) in CHECKS.items():
            report(name, None)
            began = time.perf_counter()
            broken = [need for need in needs if results[need].status in ("fail", "skipped")]
            result = (
                CheckResult(name, "skipped", f"needs {', '.join(broken)}") if broken else _run(name, check, context)
            )
            results[name] = replace(
                result,
                detail=context.user_places(result.detail),
                advice=context.user_places(result.advice),
                seconds=time.perf_counter() - began,
            )
            report(name, results[name])
    return list(results.values())


def _run(name: str, check: Callable[[CheckContext], CheckResult], context: CheckContext) -> CheckResult:
    try:
        return check(context)
    except PacelineError as error:
        return CheckResult(name, "fail", "; ".join(error.errors))
    except torch.OutOfMemoryError as error:
        return CheckResult(
            name, "fail", str(error).splitlines()[0], "give the roles other devices, or lower the budgets"
        )
