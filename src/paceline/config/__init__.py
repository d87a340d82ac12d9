"""Settings: the schema, and reading it from YAML and dotted flags.

In come a file and flags; out go strict, frozen settings, or every error at once with its file and line. No torch."""

from __future__ import annotations

from paceline.config.learning import DrafterConfig, ObjectiveConfig, OptimizerConfig
from paceline.config.load import (
    dump_settings,
    hint_for,
    known_names,
    load_settings,
    named_values,
    setting_rows,
    settings_copy,
    suggestion,
    validate_settings,
)
from paceline.config.paths import absolute_paths
from paceline.config.schema import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    FlowConfig,
    ObserveConfig,
    PlanConfig,
    Settings,
    TargetConfig,
    TrainConfig,
    devices_of,
    tasks_in_flight,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DrafterConfig",
    "EvaluateConfig",
    "FlowConfig",
    "ObjectiveConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "PlanConfig",
    "Settings",
    "TargetConfig",
    "TrainConfig",
    "absolute_paths",
    "devices_of",
    "dump_settings",
    "hint_for",
    "known_names",
    "load_settings",
    "named_values",
    "setting_rows",
    "settings_copy",
    "suggestion",
    "tasks_in_flight",
    "validate_settings",
]
