"""The configuration: read from TOML, changed by `--set a.b=value`, never by the program."""

from respec.config.collect import CollectConfig
from respec.config.critic import CriticConfig
from respec.config.drafter import DrafterConfig
from respec.config.mixture import DifficultyConfig, StageConfig
from respec.config.policy import LoraConfig, PolicyConfig
from respec.config.reading import load_config, parse_config, parse_section
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
from respec.config.terms import ReferenceConfig, TeacherConfig
from respec.config.tracking import TrackingConfig

__all__ = [
    "CheckpointConfig",
    "CollectConfig",
    "Config",
    "CriticConfig",
    "DifficultyConfig",
    "DrafterConfig",
    "EvalConfig",
    "LoraConfig",
    "ModelConfig",
    "PolicyConfig",
    "ReferenceConfig",
    "ReportConfig",
    "RewardConfig",
    "RolloutConfig",
    "Room",
    "RunConfig",
    "SpeculationConfig",
    "StageConfig",
    "TaskConfig",
    "TeacherConfig",
    "TrackingConfig",
    "WarmupConfig",
    "load_config",
    "parse_config",
    "parse_section",
]
