"""The section of the critic, which estimators `gae` and `vtrace` ask."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from respec.config.room import Room


class CriticConfig(Room):
    """The critic, of algorithms whose estimator needs values (`ppo`). Not read by the others."""

    kind: Literal["separate", "lora"] = Field(
        default="separate", description="a copy of the policy, or an adapter on the policy's own weights (needs peft)"
    )
    lora_rank: int = Field(default=16, ge=1)
    lora_alpha: float = Field(default=32.0, gt=0)
    head_start: int = Field(default=0, ge=0, description="RL steps at the beginning in which the critic alone learns")
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount a token")
    lam: float = Field(default=0.95, ge=0, le=1, description="of GAE: 0 trusts the critic, 1 the rewards")
    turn_gamma: float = Field(default=1.0, gt=0, le=1, description="bi_level_gae: discount a turn; gamma is a token's")
    turn_lam: float = Field(default=1.0, ge=0, le=1, description="bi_level_gae: of GAE over turns; lam is over tokens")
    return_lam: float | None = Field(
        default=None, ge=0, le=1, description="of the critic's own targets; None: as lam. 1 is decoupled GAE"
    )
    rho_clip: float = Field(default=1.0, gt=0, description="vtrace: largest weight of a step")
    c_clip: float = Field(default=1.0, gt=0, description="vtrace: largest weight handed on from step to step")
    bootstrap_truncated: bool = Field(
        default=False, description="let a truncated completion count as going on: add the value of its last state"
    )
    whiten_rewards: bool = Field(default=False, description="mean 0 and deviation 1 over the step's completions")
    whiten_advantages: bool = Field(default=True, description="mean 0 and deviation 1 over the step's tokens")
    lr: float = Field(default=5e-5, gt=0)
    warmup_steps: int = Field(default=0, ge=0, description="of the learning rate, in optimizer steps")
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    grad_clip: float = Field(default=1.0, gt=0)
    value_clip: float = Field(
        default=0.2, ge=0, description="how far a value may move in a step before its gradient ends; 0: any way"
    )
    epochs: int | None = Field(default=None, ge=1, description="passes over one step's samples; None: as the policy")
    minibatches: int | None = Field(default=None, ge=1, description="optimizer steps per pass; None: as the policy")
