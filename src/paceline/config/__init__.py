"""Settings: the schema, and reading it from YAML and dotted flags with every error in one line."""

from __future__ import annotations

from paceline.config.checkpoint import CheckpointConfig
from paceline.config.drafter import DrafterConfig
from paceline.config.load import dump_settings, known_names, load_settings, setting_rows, suggestion, validate_settings
from paceline.config.objective import ObjectiveConfig
from paceline.config.observe import ObserveConfig
from paceline.config.optimizer import OptimizerConfig
from paceline.config.plan import PlanConfig
from paceline.config.schema import (
    DataConfig,
    EvaluateConfig,
    FlowConfig,
    Settings,
    TargetConfig,
    TrainConfig,
    devices_of,
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
    "devices_of",
    "dump_settings",
    "known_names",
    "load_settings",
    "setting_rows",
    "suggestion",
    "validate_settings",
]
