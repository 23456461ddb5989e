"""What an engine for other programs is opened with, and asked for, held to be possible before anything is loaded or drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from respec.config import ModelConfig, SpeculationConfig, parse_section
from respec.errors import CheckpointError, ConfigError
from respec.types import Sampling
from respec.weights.checkpoint import FOLDER, latest_checkpoint

SEEDS = range(-(2**63), 2**63)


def check(sampling: Sampling, n: int, seed: int) -> None:
    """Raises ConfigError for what cannot be drawn by."""
    wrong = {
        "max_new_tokens must be at least 1": sampling.max_new_tokens < 1,
        "temperature must be a number from 0 up": not 0 <= sampling.temperature < float("inf"),
        "top_k must be 0 (off) or more": sampling.top_k < 0,
        "top_p must be above 0 and at most 1": not 0 < sampling.top_p <= 1,
        "min_p must be at least 0 and below 1": not 0 <= sampling.min_p < 1,
        "a stop string must not be empty": not all(sampling.stop),
        "n must be at least 1": n < 1,
        "seed must be a 64-bit integer": seed not in SEEDS,
    }
    for message, holds in wrong.items():
        if holds:
            raise ConfigError(f"{message}; got {sampling}, n {n}, seed {seed}")


def speculation_of(asked: str | SpeculationConfig) -> SpeculationConfig:
    """Raises ConfigError for a drafter that there is not, or that needs more than its name, and for modes that are not exact."""
    given = asked if isinstance(asked, SpeculationConfig) else {"drafter": asked}
    config = parse_section(SpeculationConfig, given, "speculation")
    if config.mode != "matching":
        raise ConfigError(
            f"speculation.mode must be 'matching', whose tokens are those of plain decoding; got '{config.mode}'"
        )
    return config


def model_config(path: str, dtype: str, device: str) -> ModelConfig:
    """Raises ConfigError for a dtype or a device that there is not."""
    return parse_section(ModelConfig, {"path": path, "dtype": dtype, "device": device}, "model")


def is_run(model: str) -> bool:
    """Whether it is a run folder."""
    return (Path(model) / "config.toml").is_file()


def newest(model: str, say: Callable[[str], None] = lambda _: None) -> tuple[str, int]:
    """What is to be loaded, and its version: a run folder's newest whole checkpoint and its step, or the model itself and 0. `say` hears of
    damaged ones. Raises CheckpointError for a run without a whole one."""
    if not is_run(model):
        return model, 0
    checkpoint = latest_checkpoint(Path(model), say)
    if checkpoint is None:
        raise CheckpointError(
            f"the run '{model}' has no checkpoint yet in '{FOLDER}'; wait for its first (checkpoint.every_steps), or take the model it begins with"
        )
    return str(checkpoint.path), checkpoint.step
