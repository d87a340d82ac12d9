"""paceline trains DFlash drafters: small block-diffusion models that make a large language model answer faster.

The names in `__all__` are the public Python API (docs/api.md). Importing paceline imports neither torch nor numpy: each
name is loaded when it is first used. To read the code, start with `train.py`, then `docs/architecture.md`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from paceline.version import __version__ as __version__

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.config.load import load_settings
    from paceline.config.schema import Settings
    from paceline.data.report import PrepareReport
    from paceline.evaluate.report import EvaluationReport
    from paceline.plan.batch_sampler import PlanBatchSampler
    from paceline.plan.epoch import plan_epoch
    from paceline.train import Outcome

__all__ = [
    "PlanBatchSampler",
    "Settings",
    "evaluate",
    "export",
    "load_settings",
    "plan_epoch",
    "prepare",
    "train",
]

_HOMES = {
    "PlanBatchSampler": "paceline.plan.batch_sampler",
    "Settings": "paceline.config.schema",
    "load_settings": "paceline.config.load",
    "plan_epoch": "paceline.plan.epoch",
}
"""Public name → the module that defines it."""


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used (PEP 562)."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")


def prepare(settings: Settings, *, replace: bool = False) -> PrepareReport:
    """Tokenizes the chats of a run into its store.

    Args:
        settings: of the run.
        replace: whether a store that was made from something else is replaced.

    Raises:
        paceline.errors.PacelineError: one line for each error.
    """
    from paceline.cli.prepare import prepare_run

    return prepare_run(settings, replace=replace)


def train(settings: Settings, *, yes: bool = False) -> Outcome:
    """Trains a drafter, or resumes the run in ``settings.run_dir``; prepares its chats first where that is not done.

    Args:
        settings: of the run.
        yes: whether settings of a run that is under way may change, from its next step on.

    Call it under ``if __name__ == "__main__":``, because the pipeline starts processes that import the main script.

    Raises:
        paceline.errors.PacelineError: one line for each error.
    """
    from paceline.cli.train import train_run

    return train_run(settings, yes=yes)


def evaluate(
    settings: Settings, drafter: str | Path | None = None, *, step: int | None = None, device: str = "cpu"
) -> EvaluationReport:
    """Decodes held-out prompts speculatively: acceptance length, and whether answers equal the target's own.

    Args:
        settings: target, held-out files and limits.
        drafter: run directory or drafter folder; None: ``settings.run_dir``.
        step: checkpoint of a run; None: the newest.
        device: where both models run.

    Raises:
        paceline.errors.PacelineError: one line for each error.
    """
    from pathlib import Path

    from paceline.cli.evaluate import evaluate_drafter, load_network

    folder = Path(drafter if drafter is not None else settings.run_dir)
    network, _ = load_network(folder, step)
    return evaluate_drafter(settings, network, title=str(folder), device=device)


def export(
    settings: Settings, out: str | Path | None = None, *, format: Literal["zlab", "speculators"] = "zlab"
) -> Path:
    """Writes the newest drafter of a run as a folder that servers read, and verifies it.

    Args:
        settings: of the run.
        out: folder to write; None: export/FORMAT in the run directory.
        format: zlab (SGLang, vLLM, z-lab dflash) or speculators (vLLM).

    Returns:
        The folder.

    Raises:
        paceline.errors.PacelineError: one line for each error.
    """
    from pathlib import Path

    from paceline.export.exporter import drafter_of_run, export_drafter

    run_dir = Path(settings.run_dir)
    folder = Path(out) if out is not None else run_dir / "export" / format
    export_drafter(drafter_of_run(run_dir), folder, format=format)
    return folder


class _Package(ModuleType):
    """Keeps the public functions when submodules of the same names (`paceline.train`) are imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
