"""The named algorithms: each a choice of four factors. A factor set in the configuration wins over the preset's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from respec.config import PolicyConfig
from respec.errors import ConfigError
from respec.policy.corrections import CORRECTIONS
from respec.policy.estimators import ESTIMATORS
from respec.policy.losses import AGGREGATIONS, SURROGATES, Bounds
from respec.policy.valued import VALUED


@dataclass(frozen=True)
class Algorithm:
    """Names of the four factors: keys of ESTIMATORS or VALUED, SURROGATES, AGGREGATIONS, CORRECTIONS; and how far a ratio may go, as in its paper.

    `filter`, a key of FILTERS, says which groups are learned from.
    """

    estimator: str
    surrogate: str
    aggregation: str
    correction: str
    clip_low: float = 0.2
    clip_high: float = 0.2
    filter: str = "none"


# RLOO takes a completion as one action: its loss sums over tokens, which is `constant` up to a factor that AdamW cancels.
PRESETS: dict[str, Algorithm] = {
    "grpo": Algorithm("group", "ppo_clip", "sequence_mean", "none"),
    "dr_grpo": Algorithm("group_without_std", "ppo_clip", "constant", "none"),
    "rloo": Algorithm("leave_one_out", "reinforce", "constant", "none"),
    "reinforce_pp": Algorithm("batch_whitened", "ppo_clip", "token_mean", "none"),
    "reinforce_pp_baseline": Algorithm("group_centred_batch_whitened", "ppo_clip", "token_mean", "none"),
    # the paper's clipping ranges, for a ratio of whole sequences
    "gspo": Algorithm("group", "gspo", "sequence_mean", "none", 3e-4, 4e-4),
    # no lower bound, as in the paper; it names no upper one, this is what TRL and ScaleRL (arXiv 2510.13786) use
    "cispo": Algorithm("group", "cispo", "token_mean", "none", 1.0, 4.0),
    # clip-higher, token mean and dynamic sampling (arXiv 2503.14476); its overlong shaping needs a number, collect.overlong_cache
    "dapo": Algorithm("group", "ppo_clip", "token_mean", "none", 0.2, 0.28, "spread"),
    # samples that a budget left over come from an older policy than the others: TIS weighs them
    "c3po": Algorithm("group", "ppo_clip", "budget", "tis"),
    "ppo": Algorithm("gae", "ppo_clip", "token_mean", "none"),
    # GRPO over whole episodes, each worth its return (arXiv 2504.20073)
    "starpo": Algorithm("group", "ppo_clip", "sequence_mean", "none"),
    # its cure for collapse: the groups of the widest spread, no KL, a clip that is wider above, and a critic
    "starpo_s": Algorithm("bi_level_gae", "ppo_clip", "token_mean", "none", 0.2, 0.28, "top_spread"),
}


def resolve(config: PolicyConfig) -> Algorithm:
    """The preset with the configuration's own factors put in. Raises ConfigError naming the known names."""
    preset = PRESETS[_known("algorithm", config.algorithm, PRESETS)]
    return Algorithm(
        _known("estimator", config.estimator or preset.estimator, {**ESTIMATORS, **VALUED}),
        _known("surrogate", config.surrogate or preset.surrogate, SURROGATES),
        _known("aggregation", config.aggregation or preset.aggregation, AGGREGATIONS),
        _known("correction", config.correction or preset.correction, CORRECTIONS),
        preset.clip_low if config.clip_low is None else config.clip_low,
        preset.clip_high if config.clip_high is None else config.clip_high,
        preset.filter,
    )


def bounds_of(config: PolicyConfig) -> Bounds:
    """The numbers that the factors take: the preset's, where the configuration names none."""
    algorithm = resolve(config)
    return Bounds(algorithm.clip_low, algorithm.clip_high, config.correction_cap, config.dual_clip)


def _known(key: str, name: str, table: Collection[str]) -> str:
    if name not in table:
        raise ConfigError(f"policy.{key}: there is no '{name}'; known: {', '.join(sorted(table))}")
    return name
