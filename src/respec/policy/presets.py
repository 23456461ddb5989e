"""The named algorithms: each a choice of four factors. A factor set in the configuration wins over the preset's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from respec.config import PolicyConfig
from respec.errors import ConfigError
from respec.policy.advantages import ESTIMATORS
from respec.policy.losses import AGGREGATIONS, CORRECTIONS, SURROGATES


@dataclass(frozen=True)
class Algorithm:
    """Names of the four factors: keys of ESTIMATORS, SURROGATES, AGGREGATIONS, CORRECTIONS."""

    estimator: str
    surrogate: str
    aggregation: str
    correction: str


# RLOO takes a completion as one action: its loss sums over tokens, which is `constant` up to a factor that AdamW cancels.
PRESETS: dict[str, Algorithm] = {
    "grpo": Algorithm("group", "ppo_clip", "sequence_mean", "none"),
    "dr_grpo": Algorithm("group_without_std", "ppo_clip", "constant", "none"),
    "rloo": Algorithm("leave_one_out", "reinforce", "constant", "none"),
}


def resolve(config: PolicyConfig) -> Algorithm:
    """The preset with the configuration's own factors put in. Raises ConfigError naming the known names."""
    preset = PRESETS[_known("algorithm", config.algorithm, PRESETS)]
    return Algorithm(
        _known("estimator", config.estimator or preset.estimator, ESTIMATORS),
        _known("surrogate", config.surrogate or preset.surrogate, SURROGATES),
        _known("aggregation", config.aggregation or preset.aggregation, AGGREGATIONS),
        _known("correction", config.correction or preset.correction, CORRECTIONS),
    )


def _known(key: str, name: str, table: Collection[str]) -> str:
    if name not in table:
        raise ConfigError(f"policy.{key}: there is no '{name}'; known: {', '.join(sorted(table))}")
    return name
