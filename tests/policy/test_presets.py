"""Presets, what a factor set by hand does to them, and unknown names."""

from __future__ import annotations

import pytest

from respec.config import PolicyConfig
from respec.errors import ConfigError
from respec.policy.filters import FILTERS
from respec.policy.losses import Bounds
from respec.policy.presets import PRESETS, Algorithm, bounds_of, resolve


def test_presets() -> None:
    assert resolve(PolicyConfig()) == Algorithm("group", "ppo_clip", "sequence_mean", "none")
    assert resolve(PolicyConfig(algorithm="dr_grpo")) == Algorithm("group_without_std", "ppo_clip", "constant", "none")
    assert resolve(PolicyConfig(algorithm="rloo")) == Algorithm("leave_one_out", "reinforce", "constant", "none")
    gspo = resolve(PolicyConfig(algorithm="gspo"))
    assert gspo == Algorithm("group", "gspo", "sequence_mean", "none", 3e-4, 4e-4)
    dapo = resolve(PolicyConfig(algorithm="dapo"))
    assert dapo == Algorithm("group", "ppo_clip", "token_mean", "none", 0.2, 0.28, "spread")
    assert resolve(PolicyConfig(algorithm="c3po")) == Algorithm("group", "ppo_clip", "budget", "tis")
    assert all(preset.filter in FILTERS for preset in PRESETS.values())
    assert bounds_of(PolicyConfig(algorithm="gspo", clip_high=0.1)) == Bounds(3e-4, 0.1, 2.0, None)
    assert all(resolve(PolicyConfig.model_construct(**{**dict(PolicyConfig()), "algorithm": name})) for name in PRESETS)


def test_a_factor_set_by_hand_wins() -> None:
    config = PolicyConfig(algorithm="dr_grpo", aggregation="token_mean", correction="tis")
    assert resolve(config) == Algorithm("group_without_std", "ppo_clip", "token_mean", "tis")


@pytest.mark.parametrize(
    ("factor", "known"),
    [
        (
            "estimator",
            "batch_whitened, bi_level_gae, gae, group, group_centred_batch_whitened, group_without_std, leave_one_out, vtrace",
        ),
        ("surrogate", "cispo, gspo, ppo_clip, reinforce"),
        ("aggregation", "budget, constant, sequence_mean, token_mean"),
        ("correction", "decoupled, mis, mis_sequence, none, tis, tis_sequence"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(factor: str, known: str) -> None:
    with pytest.raises(ConfigError, match=f"policy.{factor}: there is no 'qtrace'; known: {known}"):
        resolve(PolicyConfig.model_validate({factor: "qtrace"}))
