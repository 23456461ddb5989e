"""The configuration: read from TOML, changed by `--set a.b=value`, never by the program."""

from respec.config.critic import CriticConfig
from respec.config.drafter import DrafterConfig
from respec.config.policy import PolicyConfig
from respec.config.reading import load_config, parse_config
from respec.config.room import Room
from respec.config.sections import (
    CheckpointConfig,
    Config,
    EvalConfig,
    ModelConfig,
    ReportConfig,
    RolloutConfig,
    RunConfig,
    WarmupConfig,
)
from respec.config.speculation import SpeculationConfig
from respec.config.task import RewardConfig, TaskConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "DrafterConfig",
    "EvalConfig",
    "ModelConfig",
    "PolicyConfig",
    "ReportConfig",
    "RewardConfig",
    "RolloutConfig",
    "Room",
    "RunConfig",
    "SpeculationConfig",
    "TaskConfig",
    "WarmupConfig",
    "load_config",
    "parse_config",
]
