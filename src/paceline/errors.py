"""The exception tree. One line of text per error: what, where, what is allowed, what to do.

PacelineError
├── ConfigError (ValueError)         settings that cannot be used; exit code 2
├── DataError (ValueError)           rows, stores, prompts
├── PlanError (ValueError)           lengths, budgets, edges
├── TargetError (ValueError)         a target folder or its taps
├── DrafterError (ValueError)        a drafter that cannot be built or fed
├── CheckpointError (OSError)        a checkpoint that cannot be written or read
├── RunDirectoryError (OSError)      a run directory that belongs to something else
├── ExportError (ValueError)         a drafter folder that does not say what it must
├── StageError (RuntimeError)        a stage of the pipeline failed; names stage, batch and samples
├── TrackerError (RuntimeError)      a metrics sink that cannot start
├── MetricError (ValueError)         a metric that the catalogue does not know
├── PeerError (ConnectionError)      another rank of the drafters' group is gone
└── Interrupted (RuntimeError)       the user asked to stop; exit code 130

Every class pickles (errors cross process borders) and also is the builtin it refines.
"""

from __future__ import annotations

NOT_TRAINED = "stopped while starting: nothing was trained in this start; the same command begins again"
"""What `Interrupted` says before the first step."""


class PacelineError(Exception):
    """Root of all errors that paceline raises on purpose.

    Args:
        errors: one line per error, in the order in which the user should read them.
    """

    exit_code = 1

    def __init__(self, *errors: str) -> None:
        self.errors = errors
        super().__init__(*errors)

    def __str__(self) -> str:
        return "\n".join(self.errors)


class ConfigError(PacelineError, ValueError):
    """Settings that cannot be used as they stand."""

    exit_code = 2


class DataError(PacelineError, ValueError):
    """Rows, stores or prompts that cannot be used."""


class PlanError(PacelineError, ValueError):
    """Lengths, budgets or edges from which no plan can be made."""


class TargetError(PacelineError, ValueError):
    """A folder that cannot be used as a target, or taps that it does not have."""


class DrafterError(PacelineError, ValueError):
    """A drafter that cannot be built or fed as asked."""


class CheckpointError(PacelineError, OSError):
    """A checkpoint that could not be written or read."""


class RunDirectoryError(PacelineError, OSError):
    """A run directory that belongs to another configuration or to something else."""


class ExportError(PacelineError, ValueError):
    """A drafter folder that does not say what it must."""


class StageError(PacelineError, RuntimeError):
    """A stage of the pipeline failed; the text names stage, batch and samples."""


class PeerError(PacelineError, ConnectionError):
    """Another rank of the drafters' group is gone, so that nothing can be added up with it."""


class TrackerError(PacelineError, RuntimeError):
    """A metrics sink that cannot start."""


class MetricError(PacelineError, ValueError):
    """A metric that the catalogue does not know, so nobody could say what it means."""


class Interrupted(PacelineError, RuntimeError):
    """The user asked to stop."""

    exit_code = 130
